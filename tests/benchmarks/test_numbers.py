# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark's numbers: JSON, tables, ratios, bars, and the page of results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bars, environment, pages, sets, tables
from benchmarks.__main__ import main
from benchmarks.entrants import ENTRANTS
from benchmarks.results import Record, Results, read
from docs_tools.blocks import blocks

WHERE = environment.describe_environment("cpu", "a clock")
GPU = {**WHERE, "gpu": "a GPU"}


def record(case: str, contestant: str, quantity: str, value: float | None) -> Record:
    entrant = ENTRANTS[contestant]
    return Record(case, contestant, entrant.role, entrant.mask, quantity, value)


def test_results_survive_json(tmp_path: Path) -> None:
    first = record("a", "intervals", "forward", 0.5)
    failed = replace(first, quantity="backward", value=None, reason="no memory")
    assert replace(first, value=1.23456789e-4).plain()["value"] == 1.23457e-4
    written = Results(WHERE, {"forward": "about"}, {"a": {"length": 1}}, [first, failed])
    written.write(tmp_path / "new" / "a.json")
    assert read(tmp_path / "new" / "a.json") == written


def test_versions_of_peers_are_told_where_they_are_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        if name != "trifast":
            raise environment.metadata.PackageNotFoundError(name)
        return "7.1"

    monkeypatch.setattr(environment.metadata, "version", version)
    run = Results(environment.describe_environment("cpu", "a clock"), {}, {})
    assert run.environment["peers"] == {"trifast": "7.1"}
    assert run.peers == "trifast 7.1"
    assert ", trifast 7.1, 20" in run.heading
    # Files of earlier versions lack this field.
    assert Results({}, {}, {}).peers == ""


def test_columns_are_in_line() -> None:
    shown = str(tables.Table("title", ("", "ms"), (("a", "10.5"), ("bcd", "1")), ("a note",)))
    assert shown.splitlines()[2:4] == ["|     | ms   |", "|-----|------|"]
    assert shown.endswith("| bcd | 1    |\n\n* a note")


def test_table_without_rows_is_its_title_and_notes() -> None:
    shown = tables.Table("title", ("", "ms"), (), ("not measured",))
    assert str(shown) == "**title**\n\n* not measured"


def test_sweep_is_a_table_for_each_quantity_and_reasons_are_told_once() -> None:
    cases = sets.workload_set("legacy-forward", "cpu")
    chosen = [cases[name] for name in ("length-256", "length-512", "length-1024")]
    late = "not measured: the time budget of 1 s was spent"
    found = [
        record("length-256", "boolean", "forward", 1e-3),
        record("length-256", "sdpa", "forward", 2e-3),
        *(
            replace(record(case, who, "all", None), reason=late)
            for case in ("length-512", "length-1024")
            for who in ("boolean", "sdpa")
        ),
    ]
    cases = sets.plain_cases(chosen)
    (shown,) = tables.run_tables(Results({}, {}, cases, found))
    assert shown.heads == ("", "boolean", "sdpa")
    assert shown.rows[:2] == (("length-256", "1.000", "2.000"), ("length-512", "-", "-"))
    assert shown.notes == (f"some or all: {late} (length-512, length-1024)",)
    # A sweep without any result still shows the reason.
    (shown,) = tables.run_tables(Results({}, {}, cases, found[2:]))
    assert shown.notes == (f"some or all: {late} (length-512, length-1024)",)


# --- the bars


def verdict(work: str, *known: Record, where: dict[str, Any] = GPU) -> bars.Verdict:
    (found,) = (v for v in bars.verdicts(Results(where, {}, {}, [*known])) if v.bar.work == work)
    return found


def test_ratio_bar() -> None:
    work = "heads32-8k: intervals, forward, of FA2 on w compacted keys"
    ours = record("heads32-8k", "intervals", "forward", 0.55e-3)
    for theirs, met in ((0.5e-3, True), (0.49e-3, False)):
        found = verdict(work, ours, record("heads32-8k", "compact_flash", "forward", theirs))
        assert found.seen == pytest.approx(0.55e-3 / theirs)
        assert found.met is met
    assert verdict(work, ours).met is None


def test_speed_bar() -> None:
    work = "dense-8k: no_mask, forward, speed of dense FA2"
    theirs = record("dense-8k", "dense_flash", "forward", 0.9)
    assert verdict(work, record("dense-8k", "no_mask", "forward", 0.99), theirs).met is True
    slower = verdict(work, record("dense-8k", "no_mask", "forward", 1.01), theirs)
    assert slower.seen == pytest.approx(0.9 / 1.01)
    assert slower.met is False


def test_absolute_bars() -> None:
    work = "heads32-8k: intervals, host"
    host = record("heads32-8k", "intervals", "host", 26e-6)
    assert verdict(work, host).seen == pytest.approx(26)
    assert verdict(work, host).met is False
    work = "heads2-32k: intervals, memory forward backward, of q's bytes"
    query_bytes = 32768 * 2 * 128 * 2
    used = record("heads2-32k", "intervals", "memory_forward_backward", 8.0 * query_bytes)
    assert verdict(work, used).seen == 8
    assert verdict(work, used).met is True


def test_growth_bar() -> None:
    work = "growth-64k: intervals, forward, of linear growth from growth-8k"
    short = record("growth-8k", "intervals", "forward", 1.0)
    assert verdict(work, short, record("growth-64k", "intervals", "forward", 9.0)).met is True
    assert verdict(work, short, record("growth-64k", "intervals", "forward", 9.3)).met is False


def test_best_of_several_references_counts() -> None:
    work = "masked-4k: intervals, forward, best form of SDPA by ours"
    ours = record("masked-4k", "intervals", "forward", 1.0)
    sdpa = record("masked-4k", "sdpa", "forward", 7.0)
    gqa = record("masked-4k", "sdpa_gqa", "forward", 9.0)
    found = verdict(work, ours, sdpa, gqa, where=WHERE)
    assert found.seen == pytest.approx(7.0)
    assert found.met is False
    assert verdict(work, ours, gqa, where=WHERE).met is True


@pytest.mark.parametrize(
    ("known", "cases"),
    [
        (bars.BARS, sets.GPU),
        (bars.CPU_BARS, sets.CPU),
        (bars.SHAPE_BARS, sets.shapes(gpu=True)),
        (bars.PAIR_BARS, sets.pairs(gpu=True)),
    ],
)
def test_bars_are_of_what_a_default_run_measures(
    known: tuple[bars.Bar, ...], cases: sets.WorkloadSet
) -> None:
    for bar in known:
        for case, contestant, quantity in (bar.key, *bar.references):
            assert contestant in cases[case].contestants
            assert quantity in cases[case].quantities


def test_bar_may_compare_with_another_quantity() -> None:
    name = sets.shape_name("short", 1, 32, 8, 128, 1024, 256)
    work = f"{name}: window_size, end to end, speed of dense cuDNN's two passes"
    ours = record(name, "window_size", "end_to_end", 0.9)
    theirs = record(name, "dense_cudnn", "forward_backward", 1.0)
    cases = {name: {"length": 1024}}
    (found,) = (
        v for v in bars.verdicts(Results(GPU, {}, cases, [ours, theirs])) if v.bar.work == work
    )
    assert found.seen == pytest.approx(1 / 0.9)
    assert found.met is True


def test_every_problem_of_the_shapes_has_its_bars() -> None:
    work = [bar.key for bar in bars.SHAPE_BARS]
    assert len(work) == len(set(work))
    limits = {bar.key: bar.limit for bar in bars.SHAPE_BARS}
    hard = sets.shape_name("compact", 1, 2, 1, 64, 16384, 1024)
    assert limits[hard, "intervals", "forward"] == 1.6
    assert limits[hard, "intervals", "backward"] == 0.6
    barred = {case for case, *_ in work}
    assert {name for name in sets.shapes(gpu=True) if not name.startswith("host")} == barred


def test_missed_bars_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu.json"
    cases = sets.plain_cases([sets.GPU["selection-32k"]])
    for value, missed in ((0.4e-3, False), (0.41e-3, True)):
        found = [record("selection-32k", "intervals", "selection", value)]
        Results(GPU, {}, cases, found).write(path)
        assert main(["show", str(path), "--bars"]) == 0
        assert ("MISS" in capsys.readouterr().out) is missed


# --- the pages


def test_pages_show_what_there_is_and_name_what_is_not(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder, root = tmp_path / "results", tmp_path / "root"
    found = [
        record("masked-4k", name, "forward", seconds)
        for name, seconds in (("intervals", 1e-3), ("sdpa", 4e-3), ("dense_flash", 2e-3))
    ]
    cases = sets.plain_cases([sets.CPU["masked-4k"]])
    Results(WHERE, {}, cases, found).write(folder / "cpu.json")
    pictures = "![](figures/cpu-times-forward.png) ![](figures/cpu-absent.png)\n"
    text = f"before\n<!-- summary -->\nold\n<!-- end summary -->\n{pictures}"
    for page in pages.PAGES:
        (root / page).parent.mkdir(parents=True, exist_ok=True)
        (root / page).write_text(text + "<!-- map-table -->\n<!-- end map-table -->\nafter\n")
    arguments = ["render", "--results", str(folder), "--root", str(root)]
    assert main([*arguments, "--check"]) == 1
    assert "old" in (root / "README.md").read_text()
    assert main(arguments) == 0
    page = (root / "README.md").read_text()
    assert "| 1 ms           | 4 ms (sdpa), 4 x          | 2 ms (dense_flash), 2 x |" in page
    assert blocks(page)["map-table"] == "*Not measured yet.*\n"
    assert page.startswith("before\n")
    assert page.endswith("\nafter\n")
    assert "old" not in page
    assert (
        "| intervals   | top-w keys of each query | 1.000    |" in (folder / "cpu.md").read_text()
    )
    drawn = [path.name for path in (root / "docs" / "figures").iterdir()]
    assert drawn == ["cpu-times-forward.png"]
    assert main([*arguments, "--check"]) == 0


def test_headlines_are_of_what_a_default_run_measures() -> None:
    keys = (key for name in pages.HEADLINES for key, _ in pages.headline_keys(name))
    for file, case, who, quantity in keys:
        device, _, rest = file.partition("-")
        kind = rest if rest.startswith("legacy") else "standard"
        if rest not in ("generate", "train"):
            chosen = sets.workload_set(kind, "cpu" if device == "cpu" else "cuda")
            workload = chosen[case]
            assert who in (*workload.contestants, "triton")
            assert quantity in workload.quantities


def test_headlines_compare_with_the_best_of_each_group() -> None:
    found = [
        record("heads32-8k", name, "forward", seconds)
        for name, seconds in (
            ("intervals", 1e-3),
            ("boolean", 0.5e-3),
            ("sdpa", 4e-3),
            ("sdpa_augmented", 3e-3),
            ("key_mask", 0.1e-3),
            ("compact_flash", 0.2e-3),
            ("dense_flash", 2e-3),
            ("dense_cudnn", None),
        )
    ]
    where = {**GPU, "commit": "0123456789-dirty"}
    run = Results(where, {}, {"heads32-8k": {"length": 8192, "contestants": ["intervals"]}}, found)
    shown = pages.headlines("readme", {"h200": run})
    best = ("3 ms (sdpa_augmented), 3 x", "2 ms (dense_flash), 2 x")
    assert [row[1:] for row in shown.rows] == [("1 ms", *best)]
    assert shown.rows[0][0].startswith("a GPU: forward, ")
    told = f"commit 0123456-dirty, {GPU['date'][:10]}"
    assert shown.notes == (f"measured: h200 ({told})",)

    # The best of another file counts for the same problem on the same machine and torch.
    other = [
        record("heads32-8k", "flex", "forward", 2.5e-3),
        record("heads32-8k", "triton", "forward", 0.3e-3),
    ]
    cases = {"heads32-8k": {"length": 8192, "contestants": ["flex", "triton"]}}
    shown = pages.headlines("readme", {"h200": run, "more": Results(where, {}, cases, other)})
    assert [row[1:] for row in shown.rows] == [("1 ms", "2.5 ms (flex), 2.5 x", best[1])]
    assert shown.notes == (f"measured: h200 ({told}), more ({told})",)
    for changed, size in (({"gpu": "another"}, 8192), ({"torch": "2"}, 8192), ({}, 4096)):
        elsewhere = Results({**where, **changed}, {}, {"heads32-8k": {"length": size}}, other)
        shown = pages.headlines("readme", {"h200": run, "more": elsewhere})
        assert [row[1:] for row in shown.rows] == [("1 ms", *best)]
