# SPDX-License-Identifier: BSD-3-Clause
"""A sink is one more score in the sum of a row's softmax, without a value; lse excludes it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from drawn.calls import Call
from drawn.judge import expected
from drawn.problems import bounds
from flash_dmattn import IntervalMask, attention_reference, flash_dmattn_func
from support import Target, rand_bool, randn

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 40
SINKS = {
    "near": torch.tensor([0.5, -1.0, 3.0, 2.0]),
    "far": torch.tensor([200.0, -200.0, 1e4, -1e4]),
    "infinite": torch.tensor([torch.inf, -torch.inf, 0.0, 1.0]),
}


def call_of(target: Target, queries: int, keys: int, **changes: Any) -> Call:
    dtype = target.dtypes[0]
    rows, columns = (2, queries, HEADS, HEAD_DIM), (2, keys, KV_HEADS, HEAD_DIM)
    shapes = (rows, columns, columns, rows)
    tensors = [randn(*shape, seed=n).to(dtype) for n, shape in enumerate(shapes)]
    call = Call(*tensors, randn(2, HEADS, queries, seed=9), sink=SINKS["near"])
    return dataclasses.replace(call, **changes).to(target.device)


def packed(call: Call, q_lengths: list[int], k_lengths: list[int]) -> Call:
    """Return a call of packed sequences made of the first rows and keys of a dense one."""
    rows, keys = sum(q_lengths), sum(k_lengths)
    device = call.query.device
    changes = {
        "query": call.query[0, :rows],
        "key": call.key[0, :keys],
        "value": call.value[0, :keys],
        "dout": call.dout[0, :rows],
        "dlse": call.dlse[0, :, :rows],
        "cu_seqlens_q": bounds(q_lengths).to(device),
        "cu_seqlens_k": bounds(k_lengths).to(device),
        "longest": (max(q_lengths), max(k_lengths)),
    }
    return dataclasses.replace(call, **changes)


def check(call: Call, target: Target) -> dict[str, Tensor]:
    got = call.results(backend=target.backend)
    expected(call).check(got)
    return got


@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("mask", ["none", "rows", "intervals"])
def test_dense_sinks(target: Target, sinks: str, mask: str) -> None:
    masks = {
        "none": None,
        "rows": rand_bool(2, 1, 33, 70, density=0.3),
        "intervals": IntervalMask.sliding_window(20, 0, 33, 70),
    }
    bias = randn(2, HEADS, 1, 70, seed=5)
    check(call_of(target, 33, 70, mask=masks[mask], bias=bias, sink=SINKS[sinks]), target)


def test_bias_for_each_query(target: Target) -> None:
    call = call_of(target, 33, 70, bias=randn(1, HEADS, 33, 70, seed=5), causal=True, softcap=5.0)
    check(call, target)


@pytest.mark.parametrize("queries", [1, 3])
def test_few_queries_of_many_keys(target: Target, queries: int) -> None:
    """On GPUs the keys are then divided over blocks, whose results are merged."""
    check(call_of(target, queries, 1500, wanted=()), target)


def test_packed_sinks(target: Target) -> None:
    check(packed(call_of(target, 40, 60), [7, 0, 33], [20, 11, 29]), target)


def test_pages_and_sinks(target: Target) -> None:
    call = packed(call_of(target, 6, 32), [2, 4], [20, 12])
    pages = [t.reshape(8, 4, KV_HEADS, HEAD_DIM) for t in (call.key, call.value)]
    table = torch.tensor([[0, 1, 2, 3, 4], [5, 6, 7, 0, 0]], dtype=torch.int32)
    key, value = pages
    table = table.to(target.device)
    got = dataclasses.replace(call, key=key, value=value, block_table=table).results_alone(
        backend=target.backend
    )
    expected(dataclasses.replace(call, wanted=())).check(got)


@pytest.mark.parametrize("dtype", ["query", "float32"])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_dtypes(target: Target, half: torch.dtype, dtype: str) -> None:
    call = call_of(target, 33, 70).to(target.device, half)
    call.dlse = call.dlse.float()
    assert call.sink is not None
    call.sink = call.sink if dtype == "query" else call.sink.float()
    got = check(call, target)
    assert got["dsink"].dtype == call.sink.dtype


def test_strided_and_alone(target: Target) -> None:
    """The sink may be strided, and may be the only input with a gradient."""
    sink = torch.stack([SINKS["near"], SINKS["far"]], 1)[:, 0]
    assert not sink.is_contiguous()
    check(call_of(target, 20, 30, sink=sink, wanted=("sink",)), target)
    check(call_of(target, 20, 30, sink=SINKS["near"][:1].expand(HEADS)), target)


def test_rows_that_keep_nothing_but_the_sink(target: Target) -> None:
    """This holds even for a sink of NaN or inf."""
    mask = torch.ones(2, 1, 9, 20, dtype=torch.bool)
    mask[:, :, 4] = False
    sink = torch.tensor([torch.nan, 1.0, torch.inf, -torch.inf])
    call = call_of(target, 9, 20, mask=mask, sink=sink)
    got = call.results(backend=target.backend)
    assert (got["out"][:, 4] == 0).all()
    assert (got["lse"][:, :, 4] == -torch.inf).all()
    assert (got["dquery"][:, 4] == 0).all()
    assert got["out"][:, :4, 0].isnan().all()
    assert (got["out"][:, :4, 2] == 0).all()
    assert got["dsink"][0].isnan()
    assert not got["dsink"][1:].isnan().any()


@pytest.mark.parametrize(("batch", "queries", "keys"), [(2, 5, 0), (2, 0, 5), (0, 5, 5)])
def test_sizes_of_zero(target: Target, batch: int, queries: int, keys: int) -> None:
    call = call_of(target, queries, keys)
    call = call.mapped(lambda t: t if t.dim() == 1 else t[:batch])
    got = call.results(backend=target.backend)
    assert not any(got[name].any() for name in ("out", "dquery", "dkey", "dvalue", "dsink"))


def test_halves_merge_by_lse_without_the_sink(target: Target) -> None:
    call = call_of(target, 17, 40, wanted=())
    whole = call.results(backend=target.backend)["out"].float()
    halves = [
        dataclasses.replace(call, key=call.key[:, half], value=call.value[:, half], sink=None)
        for half in (slice(0, 25), slice(25, 40))
    ]
    outs, lses = zip(
        *(half.results(backend=target.backend).values() for half in halves), strict=True
    )
    assert call.sink is not None
    scores = torch.stack([*lses, call.sink[None, :, None].expand_as(lses[0])])
    shares = torch.softmax(scores, 0).transpose(2, 3).unsqueeze(-1)
    merged = outs[0].float() * shares[0] + outs[1].float() * shares[1]
    torch.testing.assert_close(whole, merged, atol=2e-3, rtol=2e-3)


def test_probabilities_are_less_than_one(target: Target) -> None:
    call = call_of(target, 9, 20)
    _, lse, p = flash_dmattn_func(
        call.query, call.key, call.value, sink=call.sink, return_attn_probs=True,
        backend=target.backend,
    )  # fmt: skip
    assert call.sink is not None
    share = torch.sigmoid(lse - call.sink[:, None])
    torch.testing.assert_close(p.sum(-1).float(), share, atol=1e-2, rtol=1e-2)


def test_a_plan_and_a_window_serve_sinks(target: Target) -> None:
    call = call_of(target, 33, 70, bias=randn(2, HEADS, 1, 70, seed=5), causal=True, window=9)
    check(call, target)


def test_reference_has_the_argument_and_its_second_derivative() -> None:
    tensors = [randn(1, 5, 2, 4, seed=n).double().requires_grad_() for n in range(3)]
    sink = torch.tensor([0.3, -0.7], dtype=torch.float64, requires_grad=True)
    mask = rand_bool(1, 1, 5, 5, density=0.5)
    mask[:, :, 2] = False

    def attend(query: Tensor, key: Tensor, value: Tensor, sink: Tensor) -> Tensor:
        return attention_reference(query, key, value, mask, sink=sink)[0]

    assert torch.autograd.gradcheck(attend, [*tensors, sink])
    assert torch.autograd.gradgradcheck(attend, [*tensors, sink])


def test_compiled_calls_have_the_gradient_too(pack_target: Target) -> None:
    call = call_of(pack_target, 12, 20)
    tensors = (call.query, call.key, call.value, call.sink)

    def step(*tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        return torch.autograd.grad(compute(*leaves).float().square().sum(), leaves)

    def attend(query: Tensor, key: Tensor, value: Tensor, sink: Tensor) -> Tensor:
        out = flash_dmattn_func(query, key, value, sink=sink, backend=pack_target.backend)
        assert isinstance(out, Tensor)
        return out

    compute: Any = attend
    want = step(*tensors)
    compute = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for got, eager in zip(step(*tensors), want, strict=True):
        assert torch.equal(got, eager)


def test_autocast_casts_a_sink_that_is_not_float32(pack_target: Target) -> None:
    call = call_of(pack_target, 12, 20).to(pack_target.device, torch.float32)
    tensors = [call.query, call.key, call.value]
    half = [t.to(torch.bfloat16) for t in tensors]
    for sink in (call.sink, call.sink.half()):
        with torch.autocast(pack_target.device, torch.bfloat16):
            out = flash_dmattn_func(*tensors, sink=sink, backend=pack_target.backend)
        own = sink if sink.dtype == torch.float32 else sink.to(torch.bfloat16)
        assert torch.equal(out, flash_dmattn_func(*half, sink=own, backend=pack_target.backend))
