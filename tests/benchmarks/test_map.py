# SPDX-License-Identifier: BSD-3-Clause
"""The map of lengths and kept shares: its measurements and tables; no test depends on speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import density, results
from benchmarks.__main__ import main


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("map") / "new" / "map.json"
    sizes = ["--lengths", "32", "48", "--one-in", "1", "4", "--seconds", "0.003"]
    assert main(["map", "--device", "cpu", *sizes, "--output", str(path)]) == 0
    return path


def test_every_place_is_measured(measured: Path) -> None:
    run = results.read(measured)
    cells = density.cells(run)
    places = {(cell.length, cell.one_in, cell.title) for cell in cells}
    assert len(places) == len(cells) == 8
    windows = {name: case["window"] for name, case in run.cases.items() if "dense" not in name}
    assert windows == {"map-32-1": 32, "map-32-4": 8, "map-48-1": 48, "map-48-4": 12}
    for cell in cells:
        forward = cell.title == "forward"
        name, taken = f"map-{cell.length}", "forward" if forward else "forward_backward"
        theirs = {
            who: seconds
            for (case, who, quantity), seconds in run.values.items()
            if (case, quantity) == (f"{name}-dense", taken)
        }
        assert theirs.keys() == {"sdpa", "sdpa_gqa", "sdpa_expanded"}
        assert theirs[cell.dense] == min(theirs.values())
        ours = run.values[f"{name}-{cell.one_in}", "window_size", "forward_with_mask"]
        if forward:
            assert cell.speedup == theirs[cell.dense] / ours


def test_shown_as_table_and_figure(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(measured), str(measured), "--plot", str(tmp_path)]) == 0
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("| pays from   | all") == 2


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [
        ({1: (0.9, 2.0), 2: (1.0, 1.1), 4: (3.0, 3.0)}, "1/2"),
        ({1: (1.2, 2.0), 2: (1.3, 0.9), 4: (3.0, 3.0)}, "1/4"),
        ({1: (1.2, 1.0), 2: (1.3, 2.9)}, "all"),
        ({1: (0.2, 1.0), 2: (0.3, 2.9)}, "-"),
        ({1: (1.2, 1.0), 2: (1.3, None)}, "-"),
    ],
)
def test_where_it_pays(speedups: dict[int, tuple[float | None, ...]], expected: str) -> None:
    """Some measurements of a place may be missing."""
    where = dict.fromkeys(("gpu", "cpu", "threads", "torch", "date", "measurement", "commit"), "")
    run = results.Results(where, {}, {})
    shape = {"dtype": "float32", "batch": 3, "heads": 2, "kv_heads": 1, "head_dim": 8}

    def add(case: str, who: str, quantity: str, seconds: float) -> None:
        run.cases[case] = shape
        run.records.append(results.Record(case, who, "", "", quantity, seconds))

    for quantity in ("forward", "forward_backward"):
        add("map-64-dense", "sdpa", quantity, 1.0)
    for one_in, pair in speedups.items():
        for quantity, speedup in zip(("forward_with_mask", "end_to_end"), pair, strict=True):
            if speedup is not None:
                add(f"map-64-{one_in}", "intervals", quantity, 1.0 / speedup)
    table = density.map_table(run)
    assert [row[:2] for row in table.rows] == [("64", expected)]
    assert table.title.endswith(", float32, 2 heads on 1 of 8, batch of 3, causal")
    known = [pair for pair in speedups.values() if None not in pair]
    least = " / ".join(f"{min(values):.2g}x" for values in zip(*known, strict=True))
    ((length, cell),) = density.dense_table([run]).rows
    assert (length, cell) == ("64", f"{expected}; {least}")


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "not JSON"), ("[]", "schema is None"), (json.dumps({"schema": 7}), "schema is 7")],
)
def test_other_files_are_refused(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(SystemExit):
        main(["show", str(path)])
    printed = capsys.readouterr().err
    assert str(path) in printed
    assert message in printed


def test_sizes_are_positive(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--lengths", "--one-in"):
        with pytest.raises(SystemExit):
            main(["map", "--device", "cpu", option, "0"])
        assert "0 is less than 1" in capsys.readouterr().err
