# SPDX-License-Identifier: BSD-3-Clause
"""The map of lengths and kept shares: what it measures and shows, never how fast it was."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from flash_dmattn.bench import map as density_map  # noqa: E402
from flash_dmattn.bench import map_report  # noqa: E402
from flash_dmattn.bench.__main__ import main  # noqa: E402
from flash_dmattn.bench.cases import make_inputs  # noqa: E402


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("map") / "new" / "map.json"
    arguments = ["map", "--device", "cpu", "--lengths", "32", "48", "--one-in", "1", "4"]
    assert main([*arguments, "--output", str(path)]) == 0
    return path


def test_every_place_is_measured(measured: Path) -> None:
    written, cells = map_report.load(measured)
    assert written["environment"]["threads"] == torch.get_num_threads()
    assert {(c.length, c.one_in, c.window) for c in cells} == {
        (32, 1, 32),
        (32, 4, 8),
        (48, 1, 48),
        (48, 4, 12),
    }
    assert len(cells) == 8
    assert all(c.ours_s > 0 and c.dense_s > 0 and c.speedup == c.dense_s / c.ours_s for c in cells)


def test_dense_contestants_of_a_place_are_one(measured: Path) -> None:
    _, cells = map_report.load(measured)
    for length in (32, 48):
        for which in ("forward", "forward_backward"):
            here = [c for c in cells if (c.length, c.which) == (length, which)]
            assert len({(c.dense, c.dense_s) for c in here}) == 1
            assert here[0].dense in density_map.SURVEYS["cpu"].dense


def test_measured_call_keeps_the_window() -> None:
    case = replace(density_map.SURVEYS["cpu"].shape, length=24, window=24)
    inputs = make_inputs(case)
    ours = density_map.Selecting(case, inputs)
    (out,) = ours.run_with(1, "forward")
    # One key is kept: the output is its value, the best among those that the row sees.
    assert inputs.bias is not None
    best = inputs.bias[0, :, 0].cummax(-1).indices  # (Hk, N)
    for head in range(case.heads):
        kv_head = head // case.group
        expected = inputs.value[0, best[kv_head], kv_head]
        torch.testing.assert_close(out[0, :, head], expected)


def test_shown_as_text_markdown_and_figure(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / "figures" / "map.png"
    # The same map twice: any number of devices fits into a figure.
    assert main(["map-show", str(measured), str(measured), "--plot", str(figure)]) == 0
    assert figure.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert shown.count("pays from") == 2
    assert main(["map-show", str(measured), "--markdown"]) == 0
    assert "| tokens | pays from | all | 1/4 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [
        ({1: (0.9, 2.0), 2: (1.0, 1.1), 4: (3.0, 3.0)}, "1/2"),
        ({1: (1.2, 2.0), 2: (1.3, 0.9), 4: (3.0, 3.0)}, "1/4"),
        ({1: (1.2, 1.0), 2: (1.3, 2.9)}, "all"),
        ({1: (0.2, 1.0), 2: (0.3, 2.9)}, "-"),
    ],
)
def test_where_it_pays(speedups: dict[int, tuple[float, float]], expected: str) -> None:
    cells = [
        map_report.Cell(64, 64 // one_in, one_in, which, 1.0, speedup, "Dense")
        for one_in, pair in speedups.items()
        for which, speedup in zip(("forward", "forward_backward"), pair, strict=True)
    ]
    environment: dict[str, object] = {
        "gpu": None,
        "cpu": "a",
        "threads": 2,
        "torch": "2",
        "date": "2026-01-01",
    }
    environment["measurement"] = "a clock"
    shape = {"dtype": "float32", "heads": 2, "kv_heads": 1, "head_dim": 8}
    table = map_report.table({"environment": environment, "shape": shape}, cells)
    assert [row[:2] for row in table.rows] == [("64", expected)]


def broken(text: str, written: dict[str, object]) -> str:
    if text == "not JSON":
        return "{"
    if text == "is not a map":
        return json.dumps({"results": []})
    if text == "has schema 7":
        return json.dumps({**written, "schema": 7})
    cells = written["cells"]
    assert isinstance(cells, list)
    if text == "must have cells":
        return json.dumps({**written, "cells": [{"length": 1}]})
    return json.dumps({**written, "cells": cells[1:]})


@pytest.mark.parametrize(
    "text",
    ["not JSON", "is not a map", "has schema 7", "must have cells", "each length with each share"],
)
def test_other_files_are_refused(
    text: str, measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_text(broken(text, json.loads(measured.read_text())))
    with pytest.raises(SystemExit):
        main(["map-show", str(measured), str(path)])
    message = capsys.readouterr().err
    assert str(path) in message
    assert text in message


@pytest.mark.parametrize("option", ["--lengths", "--one-in"])
def test_sizes_are_positive(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["map", "--device", "cpu", option, "0"])
    assert "0 is less than 1" in capsys.readouterr().err


def test_absent_gpu_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main(["map", "--device", "cuda"])
    assert "torch finds no CUDA device" in capsys.readouterr().err
