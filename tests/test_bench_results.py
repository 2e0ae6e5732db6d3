# SPDX-License-Identifier: BSD-3-Clause
"""What the benchmark of GPUs says about numbers: JSON, tables, ratios, and how the bars stand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from flash_dmattn.bench.gpu import bars, contestants, records, report, tables  # noqa: E402
from flash_dmattn.bench.gpu.workloads import WORKLOADS  # noqa: E402

from flash_dmattn.bench.__main__ import main  # noqa: E402
from flash_dmattn.bench.timing import Timing  # noqa: E402


def test_results_of_the_cpu_benchmark_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cpu.json"
    path.write_text('{"schema": 1}')
    with pytest.raises(SystemExit):
        main(["show", str(path)])
    assert "schema is 1; results of a GPU have 2" in capsys.readouterr().err


def record(case: str, contestant: str, quantity: str, value: float | None) -> records.Record:
    role = contestants.ENTRANTS[contestant].kind.role
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
    assert table.text() == "title\n         ms\n  a    10.5\n  bcd     1\n  a note"
    assert table.markdown().splitlines()[2:5] == ["|  | ms |", "| --- | --- |", "| a | 10.5 |"]


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


def test_bars_are_of_what_a_default_run_measures() -> None:
    for bar in bars.BARS:
        for case, contestant, quantity in filter(None, (bar.measured, bar.reference)):
            assert contestant in WORKLOADS[case].contestants
            assert quantity in WORKLOADS[case].quantities


def test_committed_results_have_a_verdict_for_every_bar() -> None:
    path = Path(__file__).resolve().parent.parent / "benchmarks" / "h200.json"
    found = bars.verdicts(report.records_of(json.loads(path.read_text())))
    assert [verdict.bar.work for verdict in found if verdict.met is None] == []


def test_check_fails_where_a_bar_is_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.json"
    environment = report.gpu_environment("cpu", None)
    for value, status in ((0.4e-3, 0), (0.41e-3, 2)):
        found = [record("selection-32k", "intervals", "selection", value)]
        chosen = [WORKLOADS["selection-32k"]]
        path.write_text(json.dumps(report.to_json(environment, chosen, found)))
        assert main(["show", str(path), "--bars", "--check"]) == status
        assert ("MISS" in capsys.readouterr().out) is (status == 2)
