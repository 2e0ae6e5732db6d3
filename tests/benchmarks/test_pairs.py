# SPDX-License-Identifier: BSD-3-Clause
"""Attention with a bias that a batch shares: the contestants, and their equal results."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import bars, engine, entrants, environment, results, sets, timing
from benchmarks.cases import PASSES, Case, make_inputs, shape_text

# trifast needs as many batch elements as keys.
SQUARE = Case(
    "", heads=2, kv_heads=2, head_dim=8, batch=12, length=12, causal=False, pair_bias=True
)


def formula(query: Any, key: Any, value: Any, bias: Any, keep: Any) -> Any:
    """Compute attention on (..., S, D) tensors; mask and bias have as many dimensions."""
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5 + bias
    return scores.masked_fill(~keep, -torch.inf).softmax(-1) @ value


def triangle_of_cuequivariance(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
    """Take q (B,N,H,S,D), a float32 bias (B,1,H,S,S) and a mask (B,N,1,1,S), True for residues."""
    assert bias.dtype == torch.float32
    assert mask.shape == (*q.shape[:2], 1, 1, q.shape[3])
    assert bias.shape == (q.shape[0], 1, q.shape[2], q.shape[3], q.shape[3])
    assert all(tensor.is_contiguous() for tensor in (q, k, v, bias))
    return formula(q, k, v, bias, mask)


def triangle_of_trifast(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
    """Take q (B,H,N,N,D), a bias (B,H,N,N) and a mask (B,N,N) that is True for dropped keys."""
    batch, heads, size, _, dim = q.shape
    assert q.shape == (batch, heads, size, size, dim)
    assert mask.shape == (batch, size, size)
    assert bias.shape == (batch, heads, size, size)
    return formula(q, k, v, bias[:, :, None], ~mask[:, None, :, None])


def flex_attention(query: Any, key: Any, value: Any, score_mod: Any) -> Any:
    """Compute FlexAttention with a backward pass, which torch's own lacks on CPUs."""
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    places = (torch.arange(size) for size in scores.shape)
    return score_mod(scores, *torch.meshgrid(*places, indexing="ij")).softmax(-1) @ value


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the peers by stand-ins with their documented arguments."""
    for name, function in (
        ("cuequivariance_ops_torch", triangle_of_cuequivariance),
        ("trifast", triangle_of_trifast),
    ):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(triangle_attention=function))
    monkeypatch.setattr(torch, "compile", lambda function, **_: flex_attention)


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.usefixtures("peers")
def test_all_compute_the_same(which: Any) -> None:
    inputs = make_inputs(SQUARE)
    names = [n for n, e in entrants.ENTRANTS.items() if e.pair and entrants.fits(n, SQUARE)]
    assert names[0] == "pair_bias"
    assert len(names) == 5
    found = {}
    for name in names:
        contestant = entrants.ENTRANTS[name].make(SQUARE, inputs)
        contestant.prepare(which)
        found[name] = contestant.results(which)
    ours = found["pair_bias"]
    assert ours[0].shape == inputs.query.shape
    if which == "forward_backward":
        assert ours[4].shape == inputs.bias.shape == (1, 2, 12, 12)
    for name in names[1:]:
        assert engine.disagreement(found[name], "pair_bias", ours, 1e-4) < 1e-4


def test_every_row_keeps_a_key() -> None:
    keep = make_inputs(replace(SQUARE, batch=64)).keep
    assert keep.shape == (64, 1, 1, 12)
    assert keep.any(-1).all()
    assert not keep.all()


def test_small_sizes_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "in_fresh_process", lambda function, *rest: function(*rest))
    workload = sets.pairs(gpu=False)["t5-64"]
    steps = engine.Measurement(workload, timing.clock_for("cpu"), 0.003).steps()
    found = {record.key[1:]: record for step in steps for record in step.run()}
    assert set(found) == {
        (name, quantity)
        for name in ("pair_bias", "pair_sdpa")
        for quantity in ("forward", "forward_backward", "memory_forward_backward")
    }
    assert all(record.value is not None for record in found.values())
    assert 0 < found["pair_sdpa", "forward_backward"].difference < 0.05


def test_a_peer_that_is_absent_is_named_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("cuequivariance_ops_torch", "trifast"):
        monkeypatch.setitem(sys.modules, name, None)
    entered = ("pair_bias", "cuequivariance", "trifast")
    workload = sets.Workload(replace(SQUARE, name="a"), entered, ("forward",))
    steps = engine.Measurement(workload, timing.clock_for("cpu"), 0.003).steps()
    found = {record.contestant: record for step in steps for record in step.run()}
    assert "cuequivariance_ops_torch" in found["cuequivariance"].reason
    assert "trifast" in found["trifast"].reason
    assert found["pair_bias"].value is not None


@pytest.mark.usefixtures("peers")
def test_what_compiles_is_compared_with_ours() -> None:
    workload = sets.Workload(replace(SQUARE, name="a"), ("pair_flex",), ("forward",))
    steps = engine.Measurement(workload, timing.clock_for("cpu"), 0.003).steps()
    (record,) = (record for step in steps for record in step.run())
    assert record.reason is None
    assert 0 < record.difference < 1e-4


def test_who_fits() -> None:
    other = replace(SQUARE, batch=3)
    assert entrants.fits("trifast", SQUARE)
    assert not entrants.fits("trifast", other)
    assert entrants.fits("cuequivariance", other)
    masked = replace(SQUARE, pair_bias=False, window=4)
    assert not any(entrants.fits(name, SQUARE) for name in ("intervals", "flex", "no_mask"))
    assert not any(entrants.fits(n, masked) for n, e in entrants.ENTRANTS.items() if e.pair)
    assert entrants.attends_to("trifast", SQUARE) == entrants.KEYS_OF_THE_MASK
    plain = sets.plain_cases([sets.pairs(gpu=True)["swin-49"]])["swin-49"]
    assert shape_text(plain).endswith("N49, bfloat16, mask of keys, bias of pairs for all")


def test_memory_is_compared_with_that_of_the_fastest_peer() -> None:
    case, where = "triangle-256", environment.describe_environment("cpu", "a clock")
    seconds = {"pair_bias": 1.0, "cuequivariance": 2.0, "pair_sdpa": 3.0}
    mib = {"pair_bias": 40.0, "cuequivariance": 50.0, "pair_sdpa": 10.0, "trifast": 5.0}
    found = [
        results.Record(case, who, "", "", quantity, value)
        for quantity, values in (("forward_backward", seconds), ("memory_forward_backward", mib))
        for who, value in values.items()
    ]
    cases = sets.plain_cases([sets.pairs(gpu=True)[case]])
    run = results.Results({**where, "gpu": "a GPU"}, {}, cases, found)
    seen = {v.bar.work: v for v in bars.verdicts(run) if v.met is not None}
    memory = seen[f"{case}: pair_bias, memory forward backward, of the fastest peer's"]
    assert memory.seen == pytest.approx(0.8)
    assert seen[f"{case}: pair_bias, forward backward, of the best peer's"].seen == 0.5
    assert len(seen) == 2
