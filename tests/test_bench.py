# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark at tiny sizes: what it computes and reports, never how fast it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from flash_dmattn.bench import cases, contestants, memory, report, runner, timing  # noqa: E402
from flash_dmattn.bench.__main__ import main  # noqa: E402

SMALL = cases.Case(name="shape", heads=4, head_dim=16, length=64, window=8)
SIZES = ["--heads", "4", "--head-dim", "16", "--length", "64", "--window", "8", "--repeats", "2"]


def _names(case: cases.Case) -> list[str]:
    return [name for name, kind in contestants.CONTESTANTS.items() if kind.supports(case)]


def test_command_writes_the_described_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "cpu.json"
    arguments = ["cpu", *SIZES, "--no-memory", "--dtypes", "float32", "bfloat16"]
    assert main([*arguments, "--output", str(path), "--check"]) == 0
    written = json.loads(path.read_text())
    assert written["schema"] == report.SCHEMA
    assert {"date", "commit", "pack", "torch", "cpu", "threads"} <= set(written["environment"])
    # The masked case and four dense ones (two dtypes, causal or not), each in two passes.
    assert len(written["results"]) == 10
    for result in written["results"]:
        names = [entry["contestant"] for entry in result["contestants"]]
        assert names == _names(cases.Case(**result["case"]))
        for entry in result["contestants"]:
            assert len(entry["samples_s"]) == 2
            assert entry["median_s"] > 0
            assert entry["memory"] is None
        (ratio,) = result["ratios"]
        assert ratio["quantity"] == "time"
        # Promises are for the default shape only.
        assert ratio["target"] is None
        assert ratio["met"] is None
    text = capsys.readouterr().out
    assert "flash_dmattn" in text
    assert "than sdpa_" in text


def test_memory_is_measured_in_a_fresh_process() -> None:
    case = cases.masked_case(SMALL, "float32")
    use = runner.memory_in_fresh_process(case, "flash_dmattn", "forward_backward")
    assert use.total_bytes >= 0
    assert use.method in (memory.RESIDENT, memory.LIFETIME)


def test_failing_memory_process_is_reported() -> None:
    case = cases.masked_case(SMALL, "float32")
    with pytest.raises(RuntimeError, match="nobody"):
        runner.memory_in_fresh_process(case, "nobody", "forward")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_peak_memory_sees_what_was_freed_again() -> None:
    def call() -> None:
        bytearray(64 << 20)

    call()
    reading = memory.peak_extra_memory(call)
    if reading.method == memory.LIFETIME:
        pytest.skip("the high-water mark cannot be reset here")
    assert 60 << 20 <= reading.extra_bytes <= 72 << 20


def test_contestants_agree_also_in_half_precision() -> None:
    for dtype in runner.AGREEMENT:
        for result in runner.run_case(cases.masked_case(SMALL, dtype), 1, with_memory=False):
            assert [entry.contestant for entry in result.entries] == _names(result.case)


def test_disagreement_stops_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attend = contestants.FlashDmattn.attend
    monkeypatch.setattr(contestants.FlashDmattn, "attend", lambda self: 1.5 * attend(self))
    assert main(["cpu", *SIZES, "--no-memory", "--kinds", "dense", "--dtypes", "float32"]) == 1
    assert "flash_dmattn differs from sdpa_expanded" in capsys.readouterr().err


def test_targets_apply_to_the_default_shape_only() -> None:
    standard = cases.Case(name="shape", window=256)
    assert cases.targets_for(cases.masked_case(standard, "float32")) == cases.MASKED_TARGETS
    assert cases.targets_for(cases.dense_case(standard, "float32", False)) == cases.DENSE_TARGETS
    assert cases.targets_for(cases.dense_case(standard, "float16", True)) == cases.NO_TARGETS
    assert cases.targets_for(cases.masked_case(SMALL, "float32")) == cases.NO_TARGETS


def test_interleaving_takes_turns_and_discards_the_first() -> None:
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    timings = timing.time_interleaved(calls, timing.CpuClock(), repeats=2)
    assert order == ["a", "b"] * 3
    assert {name: len(t.samples) for name, t in timings.items()} == {"a": 2, "b": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cpu", "--heads", "3", "--kv-heads", "2"], "heads is 3; it must be a multiple of"),
        (["cpu", "--repeats", "0"], "0 is less than 1"),
        (
            ["memory", "--case", "{}", "--contestant", "flash_dmattn", "--pass", "forward"],
            "not a case",
        ),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err
