# SPDX-License-Identifier: BSD-3-Clause
"""What the benchmark measures, on the CPU at tiny sizes: never how fast it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flash_dmattn.bench import (  # noqa: E402
    decode,
    engine,
    parts,
    peak,
    records,
    sets,
    timing,
    workloads,
)
from flash_dmattn.bench.cases import make_inputs  # noqa: E402
from flash_dmattn.bench.contestants import entrants, ours  # noqa: E402

BRIEF = timing.Effort(seconds=0.0, least=2, most=2)


def method(**changes: Any) -> engine.Method:
    return engine.Method(timing.CpuClock(), BRIEF, **changes)


def tiny(name: str, *entered: str, **changes: Any) -> workloads.Workload:
    """A workload of the table, small and on the CPU."""
    workload = sets.GPU.workloads[name]
    window = None if workload.shape.window is None else 8
    small = {"heads": 4, "kv_heads": 2, "head_dim": 16, "length": 64, "window": window}
    shape = replace(workload.shape, **small, device="cpu", **changes)
    return replace(workload, shape=shape, contestants=entered)


def run(
    workload: workloads.Workload, how: engine.Method | None = None
) -> dict[tuple[str, str], records.Record]:
    measured = engine.run_workload if workload.shape.queries is None else decode.run_decode
    found = list(measured(workload, how or method()))
    assert len({record.key for record in found}) == len(found)
    return {(record.contestant, record.quantity): record for record in found}


# --- what is measured


def test_every_quantity_of_masked_attention_is_measured() -> None:
    found = run(tiny("heads32-8k", "intervals", "boolean", "key_mask", "sdpa", "compact_flash"))
    reasons = {key: record.reason for key, record in found.items() if record.reason}
    assert reasons == {}
    both = {"forward", "backward", "forward_backward", "memory_forward", "memory_forward_backward"}
    masked = both | {"selection", "forward_with_mask", "end_to_end", "memory_with_mask"}
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
    of_masks = {"selection", "plan", "forward_planned"}
    with_masks = {"forward_with_mask", "end_to_end", "memory_with_mask"}
    assert measured == set(workloads.QUANTITIES) - of_masks - with_masks


def test_only_wanted_quantities_are_measured() -> None:
    found = run(tiny("selection-32k", "intervals"))
    assert set(found) == {("intervals", "selection")}


def test_decoding_measures_the_call_and_its_halves() -> None:
    found = run(tiny("decode-64k", "key_mask", "sdpa", "dense_flash", "compact_flash"))
    assert {key: record.reason for key, record in found.items() if record.reason} == {}
    calls = {(c, "forward") for c in ("key_mask", "sdpa", "dense_flash", "compact_flash")}
    halves = {("key_mask", "plan"), ("key_mask", "forward_planned")}
    masks = {(c, q) for c in ("key_mask", "sdpa") for q in ("selection", "forward_with_mask")}
    assert set(found) == calls | halves | masks
    assert found["sdpa", "forward"].mask == found["key_mask", "forward"].mask
    assert found["sdpa", "forward"].difference < 0.05


def test_planned_forward_computes_what_the_call_does() -> None:
    workload = tiny("heads32-8k", "intervals")
    inputs = make_inputs(workload.shape)
    for name in ("intervals", "boolean", "key_mask"):
        contestant = entrants.ENTRANTS[name].kind(workload.shape, inputs)
        contestant.prepare("forward")
        call = parts.PackCall(contestant)
        call.plan()
        assert torch.equal(call.forward(), contestant.run("forward")[0])


def test_compacted_keys_are_those_with_the_largest_bias() -> None:
    workload = tiny("heads32-8k", "compact_flash", "key_mask")
    # Distinct, since of equal ones any may be chosen.
    bias = torch.randperm(2 * 64, generator=torch.Generator().manual_seed(0)).view(1, 2, 1, 64)
    inputs = replace(make_inputs(workload.shape), bias=bias.bfloat16())
    compact, key_mask = (
        entrants.ENTRANTS[name].kind(workload.shape, inputs) for name in workload.contestants
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
    attend = ours.Boolean.attend
    monkeypatch.setattr(ours.Boolean, "attend", lambda self: 1.5 * attend(self))
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
        return lambda: out_of_memory(None, "") if type(contestant) is ours.Boolean else None

    monkeypatch.setattr(engine, "_recorded", failing_backward)
    monkeypatch.setattr(peak, "peak_extra_memory", out_of_memory)
    found = run(tiny("heads32-8k", "intervals", "boolean"))
    reason = "CUDA out of memory. Tried to allocate 9 GiB."
    assert found["boolean", "backward"].reason == reason
    assert found["intervals", "backward"].value is not None
    assert found["intervals", "memory_forward"].reason == reason


def test_spent_budget_is_told_and_nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = method(deadline=timing.Deadline(0.0))
    for workload in (tiny("dense-8k", "no_mask"), tiny("decode-64k", "key_mask")):
        (record,) = run(workload, spent).values()
        assert record.value is None
        assert record.reason == "not measured: the time budget of 0 s was spent"
    assert not timing.Deadline(None).passed
    assert not timing.Deadline(1e6).passed


# --- masks and biases that are another for each query


def test_bias_of_each_query_and_key_is_measured_on_one_mask() -> None:
    names = ("boolean", "triton", "sdpa", "sdpa_expanded", "sdpa_gqa", "sdpa_math", "sdpa_flash")
    workload = tiny("heads32-8k", *names, per_query=True)
    found = run(replace(workload, quantities=("selection", "forward", "forward_backward")))
    for name in ("sdpa", "sdpa_expanded", "sdpa_gqa", "sdpa_math"):
        for quantity in ("selection", "forward", "forward_backward"):
            record = found[name, quantity]
            assert record.reason is None
            assert record.mask == found["boolean", quantity].mask
        assert 0 < found[name, "forward_backward"].difference < 0.05
    # PyTorch's FlashAttention takes a mask on CPUs, but none that needs a gradient.
    assert found["sdpa_flash", "forward"].value is not None
    assert found["sdpa_flash", "forward_backward"].reason


def test_contestants_fit_what_they_can_compute() -> None:
    masked = tiny("heads32-8k").shape
    per_query = replace(masked, per_query=True)
    one_query = replace(per_query, queries=1, causal=False)
    dense = replace(masked, window=None)
    fitting = {
        kind: {name for name in entrants.ENTRANTS if entrants.fits(name, case)}
        for kind, case in (("masked", masked), ("query", per_query), ("dense", dense))
    }
    assert {"intervals", "key_mask"} == fitting["masked"] - fitting["query"] - {"sdpa_augmented"}
    assert {"no_mask", "dense_flash", "sdpa"} <= fitting["dense"]
    assert not {"intervals", "compact_flash", "flex", "triton"} & fitting["dense"]
    assert entrants.fits("key_mask", one_query)
    assert not entrants.fits("flex", one_query)
    assert entrants.attends_to("sdpa", one_query) == entrants.attends_to("key_mask", one_query)
    assert entrants.attends_to("sdpa", dense) == entrants.ALL_KEYS


def test_memory_of_a_cpu_is_measured_in_a_fresh_process() -> None:
    workload = replace(tiny("heads32-8k", "intervals"), quantities=("memory_with_mask",))
    (record,) = run(workload, method(fresh_memory=True)).values()
    assert record.value is not None
    assert record.value >= 0


def test_failing_memory_process_is_reported() -> None:
    with pytest.raises(RuntimeError, match="nobody"):
        peak.peak_in_fresh_process(tiny("heads32-8k").shape, "nobody", "memory_forward")
