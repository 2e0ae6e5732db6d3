# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark engine on the CPU at tiny sizes; no test depends on speed."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from dataclasses import asdict, replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import (
    contestants,
    engine,
    entrants,
    memory,
    results,
    sets,
    tables,
    timing,
)
from benchmarks.cases import make_inputs


def tiny(name: str, *entered: str, **changes: Any) -> sets.Workload:
    """Return a small CPU version of a workload."""
    workload = sets.GPU[name]
    window = None if workload.shape.window is None else 8
    small = {"heads": 4, "kv_heads": 2, "head_dim": 16, "length": 64, "window": window}
    shape = replace(workload.shape, **small, device="cpu", **changes)
    return replace(workload, shape=shape, contestants=entered)


def run(workload: sets.Workload) -> dict[tuple[str, str], results.Record]:
    measurement = engine.Measurement(workload, timing.clock_for("cpu"), 0.003)
    found = [record for step in measurement.steps() for record in step.run()]
    assert len({record.key for record in found}) == len(found)
    return {(record.contestant, record.quantity): record for record in found}


@pytest.fixture(autouse=True)
def memory_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure memory in this process, since a new process takes seconds to start."""
    monkeypatch.setattr(engine, "in_fresh_process", lambda function, *rest: function(*rest))


# --- quantities


def test_every_quantity_of_masked_attention_is_measured() -> None:
    found = run(tiny("heads32-8k", "intervals", "boolean", "key_mask", "sdpa", "compact_flash"))
    reasons = {key: record.reason for key, record in found.items() if record.reason}
    assert reasons == {}
    both = {"forward", "backward", "forward_backward", "memory_forward", "memory_forward_backward"}
    masked = both | {"selection", "forward_with_mask", "end_to_end", "memory_with_mask"}
    expected = {
        **{name: set(tables.QUANTITIES) for name in ("intervals", "boolean", "key_mask")},
        "sdpa": masked,
        "compact_flash": both | {"host", "host_forward_backward"},
    }
    assert found.keys() == {(c, quantity) for c, all_of in expected.items() for quantity in all_of}
    for (_, quantity), record in found.items():
        assert record.value is not None
        if quantity.startswith("memory"):
            assert record.value >= 0
        else:
            assert 0 < record.low <= record.value <= record.high
            assert record.samples >= 3
    # The first contestant of a mask is the reference for the others.
    assert found["intervals", "forward"].difference == 0
    assert 0 < found["sdpa", "forward_backward"].difference < 0.05


def test_without_mask_there_is_neither_selection_nor_plan() -> None:
    found = run(tiny("dense-8k", "no_mask", "dense_flash"))
    measured = {quantity for contestant, quantity in found if contestant == "no_mask"}
    of_masks = {"selection", "plan", "forward_planned"}
    with_masks = {"forward_with_mask", "end_to_end", "memory_with_mask"}
    assert measured == set(tables.QUANTITIES) - of_masks - with_masks


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
    for name in ("intervals", "boolean", "key_mask"):
        contestant = entrants.ENTRANTS[name].make(workload.shape, make_inputs(workload.shape))
        contestant.prepare("forward")
        planned = contestant.call("forward_planned")
        assert planned is not None
        assert torch.equal(planned(), contestant.run("forward")[0])


def test_compacted_keys_are_those_with_the_largest_bias() -> None:
    workload = tiny("heads32-8k", "compact_flash", "key_mask")
    # The values are distinct: ties may be resolved either way.
    bias = torch.randperm(2 * 64, generator=torch.Generator().manual_seed(0)).view(1, 2, 1, 64)
    inputs = replace(make_inputs(workload.shape), bias=bias.bfloat16())
    compact, key_mask = (
        entrants.ENTRANTS[name].make(workload.shape, inputs) for name in workload.contestants
    )
    key_mask.prepare("forward")
    for head in range(2):
        kept = inputs.key[0, key_mask.mask[0, head, 0], head]
        assert torch.equal(compact.key[0, head], kept)


# --- failures


def test_contestant_that_fails_is_reported_and_the_others_go_on() -> None:
    found = run(tiny("dense-8k", "dense_cudnn", "no_mask"))  # cuDNN has no CPU implementation
    assert found["dense_cudnn", "forward"].reason
    assert found["dense_cudnn", "forward"].value is None
    assert found["no_mask", "backward"].value is not None
    found = run(tiny("decode-64k", "dense_cudnn", "key_mask"))
    assert found["dense_cudnn", "forward"].reason
    assert found["key_mask", "forward_planned"].value is not None


def test_contestant_that_computes_something_else_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = contestants.Sdpa.attend
    monkeypatch.setattr(contestants.Sdpa, "attend", lambda self: 1.5 * attend(self))
    found = run(tiny("heads32-8k", "intervals", "sdpa"))
    assert "differs from intervals" in str(found["sdpa", "forward"].reason)
    assert ("sdpa", "backward") not in found
    assert found["intervals", "backward"].value is not None


def test_failing_measurement_is_found_among_calls_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. Advice follows.")

    call = contestants.FlashDmattn.call

    def failing_backward(self: Any, quantity: str) -> Any:
        failing = quantity == "backward" and self.form == "boolean"
        return out_of_memory if failing else call(self, quantity)

    monkeypatch.setattr(contestants.FlashDmattn, "call", failing_backward)
    monkeypatch.setattr(engine, "peak_extra_memory", out_of_memory)
    found = run(tiny("heads32-8k", "intervals", "boolean"))
    reason = "CUDA out of memory. Tried to allocate 9 GiB."
    assert found["boolean", "backward"].reason == reason
    assert found["intervals", "backward"].value is not None
    assert found["intervals", "memory_forward"].reason == reason


# --- masks and biases with a row for each query


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
    # On CPUs, PyTorch's FlashAttention takes a mask, but no mask that requires a gradient.
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


def test_a_call_that_selects_has_no_time_without_its_selection() -> None:
    found = run(tiny("heads32-8k", "intervals", "window_size"))
    assert {key: record.reason for key, record in found.items() if record.reason} == {}
    quantities = {quantity for who, quantity in found if who == "window_size"}
    timed = {quantity for quantity in quantities if not quantity.startswith("memory")}
    hosts = {"host", "host_forward_backward"}
    assert timed == {"forward_with_mask", "backward", "end_to_end", *hosts}
    assert found["window_size", "end_to_end"].mask == found["intervals", "end_to_end"].mask


def test_shapes_are_measured_beside_what_does_comparable_work() -> None:
    host, *_ = (w for name, w in sets.shapes(gpu=False).items() if name.startswith("host"))
    found = run(replace(host, shape=replace(host.shape, length=64, window=8)))
    assert {key: record.reason for key, record in found.items() if record.reason} == {}
    who = ("window_size", "no_mask", "dense_sdpa", "dense_flash")
    both = ("host", "host_forward_backward")
    assert set(found) == {(name, quantity) for name in who for quantity in both}
    short, *_ = (w for name, w in sets.shapes(gpu=False).items() if name.startswith("short"))
    found = run(short)
    assert {key: record.reason for key, record in found.items() if record.reason} == {}
    assert set(found) == {
        ("window_size", "forward_with_mask"),
        ("window_size", "end_to_end"),
        ("dense_flash", "forward"),
        ("dense_flash", "forward_backward"),
    }


# --- clocks and memory


def test_calls_take_turns_and_one_that_fails_is_left_out() -> None:
    order: list[str] = []

    def sample(call: timing.Call, seconds: float) -> list[float]:
        call()
        return [seconds]

    def fail() -> None:
        raise ValueError("no")

    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b"), "c": fail}
    found = timing.in_turns(calls, sample, 3.0)
    assert order == ["a", "b"] * 3
    assert found["a"] == found["b"] == [1.0] * 3
    assert isinstance(found["c"], ValueError)


def test_summary_divides_by_the_calls_that_were_timed_at_once() -> None:
    fields = timing.summary([2.0, 4.0, 6.0], calls=2)
    assert fields == {"value": 2.0, "low": 1.5, "high": 2.5, "samples": 3}
    assert timing.summary([1.0])["high"] == 1.0


def test_time_of_the_processor_stands_still_while_others_run() -> None:
    samples = timing.clock_for("cpu", cpu_time=True).sample(lambda: time.sleep(0.05), 0.001)
    assert min(samples) < 0.04
    with pytest.raises(ValueError, match="--cpu-time is for CPUs; the device is cuda:0"):
        timing.clock_for("cuda:0", cpu_time=True)


def test_short_work_is_timed_by_triton_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The times are in seconds."""
    asked: list[dict[str, Any]] = []

    def bench(call: timing.Call, **options: Any) -> list[float]:
        asked.append(options)
        return [2.0, 3.0]

    testing = SimpleNamespace(do_bench_cudagraph=bench)
    monkeypatch.setitem(sys.modules, "triton.testing", testing)
    assert timing.clock_for("cuda:0").replay(lambda: None, 0.05) == [0.002, 0.003]
    assert asked == [{"rep": 50.0, "return_mode": "all"}]


@pytest.mark.parametrize(
    ("on_gpu", "on_host", "counts", "aheads"),
    [
        # One call exceeds the requested time.
        (0.03, 0.001, [1], [0.001]),
        # The host is faster than the GPU.
        (0.002, 0.0001, [1, 6], [0.001, 0.0001]),
        # The host is slower: the GPU waits for the extra host time, up to a limit.
        (0.00043, 0.0007, [1, 16, 8], [0.001, 0.00502, 0.00286]),
        # The calls are split into smaller batches, since one batch would take too long.
        (0.00043, 0.002, [1, 5, 5, 5, 5, 4], [0.001, *[0.00985] * 4, 0.00828]),
        (0.00043, 0.1, [1] * 25, [0.001, *[0.01] * 24]),
    ],
)
def test_calls_are_queued_while_the_gpu_is_busy(
    monkeypatch: pytest.MonkeyPatch,
    on_gpu: float,
    on_host: float,
    counts: list[int],
    aheads: list[float],
) -> None:
    queued: list[tuple[int, float]] = []

    def queue(_: timing.Call, count: int, ahead: float) -> tuple[list[float], float]:
        queued.append((count, ahead))
        return [on_gpu] * count, on_host

    monkeypatch.setattr(timing, "_queued", queue)
    monkeypatch.setitem(sys.modules, "triton.testing", SimpleNamespace(do_bench_cudagraph=None))
    samples = timing.clock_for("cuda:0").sample(lambda: None, 0.01)
    assert len(samples) == (sum(counts[1:]) or 1)
    assert [count for count, _ in queued] == counts
    assert [ahead for _, ahead in queued] == pytest.approx(aheads)


@pytest.mark.parametrize("first_on_host", [None, 0.5], ids=["ready", "compiles"])
@pytest.mark.parametrize("on_host", [1e-5, 2e-4, 6e-4, 1e-3, 2e-3, 5e-3])
@pytest.mark.parametrize("on_gpu", [5e-5, 8e-4])
def test_a_slow_host_is_no_part_of_times(
    monkeypatch: pytest.MonkeyPatch, on_gpu: float, on_host: float, first_on_host: float | None
) -> None:
    """A GPU call ends when its work is done, but not before the host has queued it."""
    hosts = itertools.chain([first_on_host or on_host], itertools.repeat(on_host))

    def queue(_: timing.Call, count: int, ahead: float) -> tuple[list[float], float]:
        samples, gpu_is_free, queued = [], ahead, 0.0
        for _ in range(count):
            begin = max(gpu_is_free, queued)
            queued += next(hosts)
            gpu_is_free = max(begin + on_gpu, queued)
            samples.append(gpu_is_free - begin)
        return samples, queued / count

    monkeypatch.setattr(timing, "_queued", queue)
    monkeypatch.setitem(sys.modules, "triton.testing", SimpleNamespace(do_bench_cudagraph=None))
    samples = timing.clock_for("cuda:0").sample(lambda: None, 0.05)
    assert statistics.median(samples) == pytest.approx(on_gpu)


def test_triton_has_what_is_asked_of_it() -> None:
    testing = pytest.importorskip("triton.testing")
    assert {"rep", "return_mode"} <= signature(testing.do_bench_cudagraph).parameters.keys()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_peak_memory_sees_what_was_freed_again() -> None:
    def call() -> None:
        bytearray(64 << 20)

    call()
    if not memory._reset_peak():
        pytest.skip("the high-water mark cannot be reset here")
    assert 60 << 20 <= memory.peak_extra_memory(call) <= 72 << 20


def test_memory_is_measured_in_a_fresh_process() -> None:
    case = asdict(tiny("heads32-8k").shape)
    peak = memory.in_fresh_process(engine.fresh_peak, case, "intervals", "memory_with_mask", 1)
    assert peak >= 0
    with pytest.raises(KeyError, match="nobody"):
        memory.in_fresh_process(engine.fresh_peak, case, "nobody", "memory_forward", 1)
