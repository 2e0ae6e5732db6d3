# SPDX-License-Identifier: BSD-3-Clause
"""What the benchmark says about numbers: JSON, tables, ratios, bars, and the page of results."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from flash_dmattn.bench import (  # noqa: E402
    bars,
    environment,
    headlines,
    records,
    results,
    sets,
    tables,
    workloads,
)
from flash_dmattn.bench.__main__ import main  # noqa: E402
from flash_dmattn.bench.contestants.entrants import ENTRANTS  # noqa: E402
from flash_dmattn.bench.timing import Timing  # noqa: E402


def test_results_of_another_schema_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cpu.json"
    path.write_text('{"schema": 1}')
    with pytest.raises(SystemExit):
        main(["show", str(path)])
    assert "schema is 1; results have 2" in capsys.readouterr().err


def record(case: str, contestant: str, quantity: str, value: float | None) -> records.Record:
    role = ENTRANTS[contestant].kind.role
    return records.Record(case, contestant, role, "", quantity, value)


def test_records_survive_json() -> None:
    first = record("a", "intervals", "forward", 0.5)
    failed = replace(first, value=None, reason="no memory")
    assert records.to_plain(replace(first, value=1.23456789e-4))["value"] == 1.23457e-4
    for each in (first, failed):
        assert records.from_plain(json.loads(json.dumps(records.to_plain(each)))) == each


def test_summary_divides_by_the_calls_that_were_timed_at_once() -> None:
    fields = records.summary(Timing((2.0, 4.0, 6.0)), calls=2)
    assert fields == {"value": 2.0, "low": 1.5, "high": 2.5, "samples": 3}
    assert records.summary(Timing((1.0,)))["high"] == 1.0


def test_ratios_are_ours_by_theirs() -> None:
    found = records.ratios(
        [
            record("a", "intervals", "forward", 2.0),
            record("a", "compact_flash", "forward", 4.0),
            record("a", "dense_flash", "forward", None),
            record("b", "dense_flash", "forward", 1.0),
            record("a", "intervals", "memory_forward", 1.0),
        ]
    )
    assert found == [
        {
            "case": "a",
            "quantity": "forward",
            "contestant": "intervals",
            "to": "compact_flash",
            "value": 0.5,
        }
    ]


def test_columns_are_in_line() -> None:
    table = tables.Table("title", ("", "ms"), (("a", "10.5"), ("bcd", "1")), ("a note",))
    lines = table.text().splitlines()
    assert [line.rstrip() for line in lines[2:]] == [
        "---  ----",
        "a    10.5",
        "bcd     1",
        "a note",
    ]
    assert table.markdown().splitlines()[2:5] == ["|  | ms |", "| --- | --- |", "| a | 10.5 |"]
    assert table.markdown().endswith("| bcd | 1 |\n\n* a note")


def test_table_without_rows_is_its_title_and_notes() -> None:
    table = tables.Table("title", ("", "ms"), (), ("not measured",))
    assert table.text() == "title\nnot measured"
    assert table.markdown() == "**title**\n\n* not measured"


def test_sweep_is_a_table_for_each_quantity_and_reasons_are_told_once() -> None:
    cases = sets.workload_set("legacy-forward", "cpu").workloads
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
    (table,) = results.result_tables(results.to_json({}, chosen, found))
    assert table.heads == ("", "boolean", "sdpa")
    assert table.rows[:2] == (("length-256", "1.000", "2.000"), ("length-512", "-", "-"))
    assert table.notes == (f"some or all: {late} (length-512, length-1024)",)
    # A sweep of which nothing is known still says why.
    (table,) = results.result_tables(results.to_json({}, chosen, found[2:]))
    assert table.notes == (f"some or all: {late} (length-512, length-1024)",)


# --- the bars


def verdict(work: str, *known: records.Record) -> bars.Verdict:
    (found,) = (v for v in bars.verdicts(known) if v.bar.work == work)
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
    work = "dense-8k: no mask, forward, speed of dense FA2"
    theirs = record("dense-8k", "dense_flash", "forward", 0.9)
    assert verdict(work, record("dense-8k", "no_mask", "forward", 0.99), theirs).met is True
    slower = verdict(work, record("dense-8k", "no_mask", "forward", 1.01), theirs)
    assert slower.seen == pytest.approx(0.9 / 1.01)
    assert slower.met is False


def test_absolute_bars() -> None:
    work = "heads32-8k: intervals, host time of a forward call"
    host = record("heads32-8k", "intervals", "host", 26e-6)
    assert verdict(work, host).seen == pytest.approx(26)
    assert verdict(work, host).met is False
    work = "heads2-32k: intervals, forward and backward, peak extra memory, of the bytes of q"
    query_bytes = 32768 * 2 * 128 * 2
    used = record("heads2-32k", "intervals", "memory_forward_backward", 8.0 * query_bytes)
    assert verdict(work, used).seen == 8
    assert verdict(work, used).met is True


def test_growth_bar() -> None:
    work = "growth 8k to 64k: intervals, forward, of linear growth"
    short = record("growth-8k", "intervals", "forward", 1.0)
    assert verdict(work, short, record("growth-64k", "intervals", "forward", 9.0)).met is True
    assert verdict(work, short, record("growth-64k", "intervals", "forward", 9.3)).met is False


def test_best_of_several_references_counts() -> None:
    ours = record("masked-4k", "intervals", "forward", 1.0)
    forms = [
        record("masked-4k", name, "forward", t) for name, t in (("sdpa", 7.0), ("sdpa_gqa", 9.0))
    ]
    (found,) = (v for v in bars.verdicts([ours, *forms], bars.CPU_BARS) if v.seen is not None)
    assert found.seen == pytest.approx(7.0)
    assert found.met is False
    (found, *_) = bars.verdicts([ours, forms[1]], bars.CPU_BARS)
    assert found.met is True


@pytest.mark.parametrize(("known", "cases"), [(bars.BARS, sets.GPU), (bars.CPU_BARS, sets.CPU)])
def test_bars_are_of_what_a_default_run_measures(
    known: tuple[bars.Bar, ...], cases: workloads.WorkloadSet
) -> None:
    for bar in known:
        for case, contestant, quantity in (bar.measured, *bar.references):
            assert contestant in cases.workloads[case].contestants
            assert quantity in cases.workloads[case].quantities


def test_check_fails_where_a_bar_is_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.json"
    where = {**environment.describe_environment("cpu"), "gpu": "a GPU", "cuda": "", "cudnn": ""}
    for value, status in ((0.4e-3, 0), (0.41e-3, 2)):
        found = [record("selection-32k", "intervals", "selection", value)]
        chosen = [sets.GPU.workloads["selection-32k"]]
        results.write_json(path, results.to_json(where, chosen, found))
        assert main(["show", str(path), "--bars", "--check"]) == status
        assert ("MISS" in capsys.readouterr().out) is (status == 2)


# --- the page

PAGE = """before
<!-- results: summary -->
<!-- end results -->
between
<!-- results: cpu -->
old
<!-- end results -->
<!-- results: cpu-generate -->
old
<!-- end results -->
after
"""


def test_page_shows_what_there_is_and_names_what_is_not(tmp_path: Path) -> None:
    folder, page, figures = tmp_path / "in", tmp_path / "page.md", tmp_path / "figures"
    workload = sets.CPU.workloads["masked-4k"]
    found = [
        records.Record("masked-4k", name, ENTRANTS[name].kind.role, mask, "forward", seconds)
        for name, mask, seconds in (
            ("intervals", "top-w keys of each query", 1e-3),
            ("sdpa", "top-w keys of each query", 4e-3),
            ("dense_flash", "all keys", 2e-3),
        )
    ]
    written = results.to_json(environment.describe_environment("cpu"), [workload], found)
    results.write_json(folder / "cpu.json", written)
    page.write_text(PAGE)
    figures.mkdir()
    (figures / "cpu-old.png").touch()
    (figures / "cpu-generate-old.png").touch()
    paths = ["--results", str(folder), "--page", str(page), "--figures", str(figures)]
    assert main(["render", *paths, "--check"]) == 1
    assert page.read_text() == PAGE
    assert main(["render", *paths]) == 0
    text = page.read_text()
    assert "forward | 1 ms | 4 ms (sdpa), 4 x | 2 ms (dense_flash), 2 x |" in text
    assert "![times, forward](figures/cpu-times-forward.png)" in text
    assert "| intervals | top-w keys of each query | 1.000 |" in text
    assert text.count("*Not measured yet.*") == 1
    assert "\nold\n" not in text
    # A picture of another block stays, one that is no longer drawn goes.
    kept = {path.name for path in figures.iterdir()}
    assert kept == {"cpu-times-forward.png", "cpu-generate-old.png"}
    assert main(["render", *paths, "--check"]) == 0
    assert [line for line in text.splitlines() if line in ("before", "between", "after")] == [
        "before",
        "between",
        "after",
    ]


def test_headlines_are_of_what_a_default_run_measures() -> None:
    kinds = {"": "standard", "-legacy-forward": "legacy-forward"}
    kinds["-legacy-backward"] = "legacy-backward"
    for line in chain.from_iterable(headlines.HEADLINES.values()):
        device, _, rest = line.file.partition("-")
        if rest != "generate":
            kind = kinds[f"-{rest}" if rest else ""]
            chosen = sets.workload_set(kind, "cuda" if device == "h200" else "cpu")
            assert line.ours in chosen.workloads[line.case].contestants
            assert line.quantity in chosen.workloads[line.case].quantities


def test_headlines_compare_with_the_best_of_each_group() -> None:
    same, every = "top-w keys of each query", "all keys"
    found = [
        records.Record("heads32-8k", name, role, mask, "forward", seconds)
        for name, role, mask, seconds in (
            ("intervals", "ours", same, 1e-3),
            ("boolean", "ours", same, 0.5e-3),
            ("sdpa", "baseline", same, 4e-3),
            ("sdpa_augmented", "information", same, 3e-3),
            ("flex", "baseline", "another mask", 0.1e-3),
            ("compact_flash", "information", "only w keys, not causal", 0.2e-3),
            ("dense_flash", "baseline", every, 2e-3),
            ("dense_cudnn", "baseline", every, None),
        )
    ]
    where = {**environment.describe_environment("cpu"), "gpu": "a GPU"}
    written = results.to_json(where, [], found)
    table = headlines.headlines("readme-h200", {"h200": written})
    cells = ("forward", "1 ms", "3 ms (sdpa_augmented), 3 x", "2 ms (dense_flash), 2 x")
    assert table.rows == (cells,)
    assert table.title == "a GPU"
