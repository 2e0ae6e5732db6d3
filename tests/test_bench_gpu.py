# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of GPUs, on the CPU at tiny sizes: what it measures and says, never how fast."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flash_dmattn.bench.gpu import (  # noqa: E402
    clock,
    contestants,
    decode,
    parts,
    records,
    report,
    runner,
    workloads,
)
from flash_dmattn.bench.gpu.workloads import WORKLOADS  # noqa: E402

from flash_dmattn.bench.__main__ import main  # noqa: E402
from flash_dmattn.bench.timing import CpuClock  # noqa: E402

BRIEF = clock.Effort(seconds=0.0, least=2, most=2)


def tiny(name: str, *entered: str, **changes: Any) -> workloads.Workload:
    """A workload of the table, small and on the CPU."""
    workload = WORKLOADS[name]
    window = None if workload.shape.window is None else 8
    shape = replace(
        workload.shape, heads=4, kv_heads=2, head_dim=16, length=64, window=window, device="cpu"
    )
    return replace(workload, shape=shape, contestants=entered, **changes)


@pytest.fixture
def tiny_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, workload in WORKLOADS.items():
        entered = [c for c in workload.contestants if not c.endswith(("cudnn", "flex"))]
        monkeypatch.setitem(WORKLOADS, name, tiny(name, *entered))
    monkeypatch.setattr("flash_dmattn.bench.gpu.command.LITTLE", BRIEF)
    monkeypatch.setattr(clock, "_HOST_ROUNDS", 1)


def run(workload: workloads.Workload) -> dict[tuple[str, str], records.Record]:
    measured = runner.run_workload if workload.queries is None else decode.run_decode
    found = list(measured(workload, CpuClock(), BRIEF))
    assert len({record.key for record in found}) == len(found)
    return {(record.contestant, record.quantity): record for record in found}


# --- what is measured


def test_every_quantity_of_masked_attention_is_measured() -> None:
    found = run(tiny("heads32-8k", "intervals", "boolean", "key_mask", "sdpa", "compact_flash"))
    reasons = {key: record.reason for key, record in found.items() if record.reason}
    assert reasons == {}
    both = {"forward", "backward", "forward_backward", "memory_forward", "memory_forward_backward"}
    masked = both | {"selection", "end_to_end", "memory_with_mask"}
    expected = {
        **{name: set(workloads.QUANTITIES) for name in ("intervals", "boolean", "key_mask")},
        "sdpa": masked,
        "compact_flash": both,
    }
    assert found.keys() == {(c, quantity) for c, all_of in expected.items() for quantity in all_of}
    for (_, quantity), record in found.items():
        assert record.value is not None
        if quantity.startswith("memory"):
            assert record.value >= 0
        else:
            assert 0 < record.low <= record.value <= record.high
            assert record.samples >= 2
    # The first of a mask is what the others are compared with.
    assert found["intervals", "forward"].difference == 0
    assert 0 < found["sdpa", "forward_backward"].difference < 0.05


def test_without_mask_there_is_neither_selection_nor_plan() -> None:
    found = run(tiny("dense-8k", "no_mask", "dense_flash"))
    measured = {quantity for contestant, quantity in found if contestant == "no_mask"}
    left_out = {"selection", "plan", "forward_planned", "end_to_end", "memory_with_mask"}
    assert measured == set(workloads.QUANTITIES) - left_out


def test_only_wanted_quantities_are_measured() -> None:
    found = run(tiny("selection-32k", "intervals"))
    assert set(found) == {("intervals", "selection")}


def test_decoding_measures_the_call_and_its_halves() -> None:
    found = run(tiny("decode-64k", "key_mask", "sdpa", "dense_flash", "compact_flash"))
    assert {key: record.reason for key, record in found.items() if record.reason} == {}
    calls = {(c, "forward") for c in ("key_mask", "sdpa", "dense_flash", "compact_flash")}
    assert set(found) == calls | {("key_mask", "plan"), ("key_mask", "forward_planned")}
    assert found["sdpa", "forward"].mask == found["key_mask", "forward"].mask
    assert found["sdpa", "forward"].difference < 0.05


def test_planned_forward_computes_what_the_call_does() -> None:
    workload = tiny("heads32-8k", "intervals")
    inputs = runner.make_inputs(workload.shape)
    for name in ("intervals", "boolean", "key_mask"):
        contestant = contestants.ENTRANTS[name].kind(workload.shape, inputs)
        contestant.prepare("forward")
        call = parts.PackCall(contestant)
        call.plan()
        assert torch.equal(call.forward(), contestant.run("forward")[0])


def test_compacted_keys_are_those_with_the_largest_bias() -> None:
    workload = tiny("heads32-8k", "compact_flash", "key_mask")
    # Distinct, since of equal ones any may be chosen.
    bias = torch.randperm(2 * 64, generator=torch.Generator().manual_seed(0)).view(1, 2, 1, 64)
    inputs = replace(runner.make_inputs(workload.shape), bias=bias.bfloat16())
    compact, key_mask = (
        contestants.ENTRANTS[name].kind(workload.shape, inputs) for name in workload.contestants
    )
    key_mask.prepare("forward")
    for head in range(2):
        kept = inputs.key[0, key_mask.mask[0, head, 0], head]
        assert torch.equal(compact.key[0, head], kept)


# --- what fails


def test_contestant_that_fails_is_reported_and_the_others_go_on() -> None:
    found = run(tiny("dense-8k", "dense_cudnn", "no_mask"))  # cuDNN has nothing for CPUs
    assert found["dense_cudnn", "forward"].reason
    assert found["dense_cudnn", "forward"].value is None
    assert found["no_mask", "backward"].value is not None
    found = run(tiny("decode-64k", "dense_cudnn", "key_mask"))
    assert found["dense_cudnn", "forward"].reason
    assert found["key_mask", "forward_planned"].value is not None


def test_contestant_that_computes_something_else_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = contestants.Boolean.attend
    monkeypatch.setattr(contestants.Boolean, "attend", lambda self: 1.5 * attend(self))
    found = run(tiny("heads32-8k", "intervals", "boolean"))
    assert "differs from intervals" in found["boolean", "forward"].reason
    assert ("boolean", "backward") not in found
    assert found["intervals", "backward"].value is not None


def test_failing_measurement_is_found_among_calls_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def out_of_memory(call: Any, device: str) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. Advice follows.")

    def failing_backward(contestant: Any) -> Any:
        return lambda: out_of_memory(None, "") if type(contestant) is contestants.Boolean else None

    monkeypatch.setattr(runner, "_recorded", failing_backward)
    monkeypatch.setattr(runner, "peak_extra_memory", out_of_memory)
    found = run(tiny("heads32-8k", "intervals", "boolean"))
    reason = "CUDA out of memory. Tried to allocate 9 GiB."
    assert found["boolean", "backward"].reason == reason
    assert found["intervals", "backward"].value is not None
    assert found["intervals", "memory_forward"].reason == reason


@pytest.mark.usefixtures("tiny_workloads")
def test_case_whose_inputs_fail_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_inputs = runner.make_inputs

    def fail_for_one(case: Any) -> Any:
        if case.name == "growth-8k":
            raise torch.OutOfMemoryError("no room")
        return make_inputs(case)

    monkeypatch.setattr(runner, "make_inputs", fail_for_one)
    chosen = ["--cases", "growth-8k", "dense-8k", "--quantities", "forward"]
    assert main(["gpu", "--device", "cpu", "--quick", *chosen]) == 0
    text = capsys.readouterr().out
    assert "intervals, inputs: no room" in text
    assert "dense-8k" in text


# --- what is chosen


def test_cases_are_chosen_by_pattern_and_cut_down() -> None:
    chosen = workloads.chosen_workloads(
        ["growth-*", "decode-64k"],
        ["key_mask", "flex", "sdpa"],
        ["forward"],
        "cuda:1",
        without=["sdpa"],
    )
    assert [w.name for w in chosen] == [*(f"growth-{n}k" for n in (8, 16, 32, 64)), "decode-64k"]
    assert all(w.quantities == ("forward",) and w.shape.device == "cuda:1" for w in chosen)
    # Decoding has no FlexAttention; elsewhere who is asked for takes part.
    assert {w.contestants for w in chosen} == {("key_mask", "flex"), ("key_mask",)}


def test_quick_run_leaves_slow_contestants_out() -> None:
    chosen = workloads.chosen_workloads([], None, None, "cuda", quick=True)
    assert [w.name for w in chosen] == list(workloads.QUICK)
    assert not {c for w in chosen for c in w.contestants} & set(workloads.SLOW_CONTESTANTS)


def test_tables_name_what_there_is() -> None:
    for workload in WORKLOADS.values():
        assert set(workload.contestants) <= contestants.ENTRANTS.keys()
        assert set(workload.quantities) <= workloads.QUANTITIES.keys()
    shown = {quantity for quantity, *_ in report._COLUMNS}
    assert shown == workloads.QUANTITIES.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpu", "--device", "cpu", "--cases", "heads3-*"], "no case matches 'heads3-*'; cases"),
        (["gpu", "--device", "cpu", "--contestants", "nobody"], "invalid choice: 'nobody'"),
        (["gpu", "--device", "cpu", "--quantities", "speed"], "invalid choice: 'speed'"),
        (
            ["gpu", "--device", "cpu", "--cases", "dense-8k", "--contestants", "intervals"],
            "none of dense-8k measures intervals",
        ),
        (["show", "missing.json"], "missing.json"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_missing_gpu_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main(["gpu"])
    assert "torch finds no CUDA device" in capsys.readouterr().err


# --- the whole command


@pytest.mark.usefixtures("tiny_workloads")
def test_command_writes_what_show_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "gpu.json"
    chosen = ["--quick", "--cases", "dense-8k", "growth-8k", "growth-16k", "--commit", "abc"]
    status = main(
        ["gpu", "--device", "cpu", *chosen, "--output", str(path), "--plot", str(tmp_path)]
    )
    assert status == 0
    measured = capsys.readouterr()
    assert "3/" in measured.err
    written = json.loads(path.read_text())
    assert written["schema"] == report.SCHEMA
    assert written["environment"]["commit"] == "abc"
    assert set(written["cases"]) == {"dense-8k", "growth-8k", "growth-16k"}
    for name in ("bars", "growth"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert main(["show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown == measured.out
    assert "dense-8k (B1 H4 Hk2 D16 N64, bfloat16, causal)" in shown
    assert main(["show", str(path), "--markdown", "--bars"]) == 0
    shown = capsys.readouterr().out
    assert "| intervals | top-w keys of each query |" in shown
    assert "| heads32-8k: selection | <= 0.08 ms | - |  | not measured |" in shown
