# SPDX-License-Identifier: BSD-3-Clause
"""A float64 bias for each key is exact: digits that float32 would round count."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from drawn.buffers import poisoned_buffers
from flash_dmattn import (
    IntervalMask,
    attention_reference,
    dynamic_mask,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    make_plan,
)
from flash_dmattn.ops import attention
from flash_dmattn.record import AttentionInputs
from support import Problem, Target, assert_accurate, randn, reads_float64, simple_problem

FAR = 3e9  # float32 has steps of 256 there


@pytest.fixture
def exact(target: Target) -> Target:
    """Return a target that reads a float64 bias; test_who_cannot_read_it_says_so has the others."""
    if not reads_float64(target):
        pytest.skip("its kernels read no float64")
    return target


def far_bias(*shape: int, seed: int = 7) -> Tensor:
    return FAR + randn(*shape, seed=seed).double()


class FarProblem(Problem):
    """A problem with a bias near FAR; its eager formula uses the bias minus FAR."""

    def eager(self, *, dout: Tensor, dlse: Tensor | None = None) -> dict[str, Tensor]:
        assert self.bias is not None
        near = Problem(**{**self.__dict__, "bias": (self.bias - FAR).to(self.query.dtype)})
        found = near.eager(dout=dout, dlse=dlse)
        return {**found, "lse": found["lse"].double() + FAR, "dbias": found["dbias"].double()}


def check(problem: Problem, target: Target, *, with_dlse: bool = False) -> dict[str, Tensor]:
    """Compare with float64 by the rule; compare lse minus FAR."""
    problem = FarProblem(**problem.__dict__)
    dout = randn(*problem.query.shape, dtype=problem.query.dtype, seed=5)
    batch, rows, heads, _ = problem.query.shape
    dlse = randn(batch, heads, rows, seed=6).double() if with_dlse else None
    parts = [
        problem.results(target, dout=dout, dlse=dlse),
        problem.truth(dout=dout, dlse=dlse),
        problem.eager(dout=dout, dlse=dlse),
    ]
    assert parts[0]["lse"].dtype == torch.float64
    assert parts[0]["dbias"].dtype == torch.float64
    for part in parts:
        part["lse"] = part["lse"] - FAR
    assert_accurate(*parts)
    return parts[0]


@pytest.mark.parametrize("shape", [(2, 4), (2, 2), (1, 1), (1, 4)])
@pytest.mark.parametrize("causal", [False, True])
def test_of_any_heads(shape: tuple[int, int], causal: bool, exact: Target) -> None:
    for dtype in exact.dtypes:
        problem = simple_problem(dtype, queries=70, keys=90, causal=causal)
        problem.bias = far_bias(*shape, 1, 90)
        check(problem, exact, with_dlse=True)


def test_with_softcap_masks_and_dropped_keys(exact: Target) -> None:
    start = torch.randint(0, 40, (2, 2, 90), generator=torch.Generator().manual_seed(0)).int()
    problem = simple_problem(exact.dtypes[0], queries=70, keys=90, causal=False)
    problem.mask, problem.softcap = IntervalMask(start, start + 25), 2.0
    problem.bias = far_bias(2, 4, 1, 90)
    problem.bias[:, 1, :, 3:60:7] = -math.inf
    problem.bias[0, :, :, 30:50] = -math.inf
    check(problem, exact)


def test_expanded_and_sliced(exact: Target) -> None:
    problem = simple_problem(exact.dtypes[0], queries=70, keys=90, causal=True)
    problem.bias = far_bias(2, 4, 1, 180)[..., ::2]
    check(problem, exact)
    problem.bias = far_bias(1, 4, 1, 1)
    check(problem, exact)


def test_rows_that_keep_nothing(exact: Target) -> None:
    problem = simple_problem(exact.dtypes[0], queries=20, keys=9, causal=True)
    problem.bias = torch.full((2, 4, 1, 9), -math.inf, dtype=torch.float64)
    problem.bias[0, 0, 0, 4:] = FAR
    dout = randn(*problem.query.shape, dtype=problem.query.dtype)
    got = problem.results(exact, dout=dout)
    assert all(got[name].isfinite().all() for name in ("out", "dquery", "dkey", "dvalue", "dbias"))
    assert (got["lse"][1] == -math.inf).all()
    assert not got["out"][1].any()
    assert (got["lse"][0, 0, 15:] > FAR - 100).all()


@pytest.mark.parametrize("lowest", [-1e300, torch.finfo(torch.float64).min, -1e39])
def test_the_lowest_numbers_are_kept(lowest: float, exact: Target) -> None:
    query, key, value = (randn(1, 6, 2, 8, seed=s, dtype=exact.dtypes[0]) for s in range(3))
    bias = torch.zeros(1, 1, 1, 6, dtype=torch.float64)
    bias[..., :3] = lowest
    out, lse = flash_dmattn_func(
        *(t.to(exact.device) for t in (query, key, value)), None, bias.to(exact.device),
        is_causal=True, return_lse=True, backend=exact.backend,
    )  # fmt: skip
    # The first three rows see only keys with the lowest bias.
    assert out.cpu()[:, 0].sub(value[:, 0]).abs().max() < 1e-2
    assert out[:, :3].any(-1).all()
    assert lse[..., 3:].isfinite().all()
    assert not out.isnan().any()


@pytest.mark.parametrize("sink_at", [0.0, 1.0])
def test_a_sink_is_compared_with_the_whole(sink_at: float, exact: Target) -> None:
    """The sink has no bias: far above or below the bias, its share is all or nothing."""
    query, key, value = (randn(2, 9, 4, 8, seed=s, dtype=exact.dtypes[0]) for s in range(3))
    sink, near = randn(4, seed=8), randn(2, 4, 1, 9, seed=9).double()
    for base in (0.0, 5e3, -5e3):
        bias = (near + base).to(exact.device).requires_grad_()
        own = (sink + base * sink_at).to(exact.device).requires_grad_()
        tensors = [t.to(exact.device).requires_grad_() for t in (query, key, value)]
        out = flash_dmattn_func(*tensors, None, bias, sink=own, backend=exact.backend)
        leaves = [t.detach().cpu().double().requires_grad_() for t in (*tensors, bias, own)]
        wanted, _ = attention_reference(*leaves[:3], None, leaves[3], sink=leaves[4])
        tolerance = 16 * torch.finfo(query.dtype).eps
        got = [out, *torch.autograd.grad(out.sum(), [*tensors, bias, own])]
        truth = [wanted, *torch.autograd.grad(wanted.sum(), leaves)]
        for one, other in zip(got, truth, strict=True):
            torch.testing.assert_close(
                one.detach().cpu().double(), other, atol=tolerance, rtol=tolerance
            )


def test_packed_sequences(exact: Target) -> None:
    bounds = torch.tensor([0, 0, 33, 34, 90], dtype=torch.int32).to(exact.device)
    query, key, value = (
        randn(90, 4, 16, seed=s, dtype=exact.dtypes[0]).to(exact.device) for s in range(3)
    )
    bias = far_bias(4, 1, 90).to(exact.device).requires_grad_()
    out, lse = flash_dmattn_varlen_func(
        query, key, value, bounds, bounds, 56, 56, attn_bias=bias, is_causal=True,
        return_lse=True, backend=exact.backend,
    )  # fmt: skip
    (got,) = torch.autograd.grad(out.sum(), bias)
    own = bias.detach().cpu().requires_grad_()
    wanted, wanted_lse = attention_reference(
        *(t.cpu().double() for t in (query, key, value)), None, own, causal=True,
        cu_seqlens_q=bounds.cpu(), cu_seqlens_k=bounds.cpu(),
    )  # fmt: skip
    (dbias,) = torch.autograd.grad(wanted.sum(), own)
    tolerance = 16 * torch.finfo(query.dtype).eps
    for one, other in ((out, wanted), (lse, wanted_lse), (got, dbias)):
        torch.testing.assert_close(one.cpu().double(), other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", ["none", "intervals", "keys", "rows"])
@pytest.mark.parametrize("queries", [(0,), (0, 2, 3, 29, 200), (35, 0, 1)], ids=str)
def test_sequences_without_rows(queries: tuple[int, ...], kind: str, exact: Target) -> None:
    """Their keys have ordinary biases, and old contents of memory are not read."""
    keys = tuple(range(170, 170 - 40 * len(queries), -40))
    total_q, total_k = sum(queries), sum(keys)
    dtype = exact.dtypes[0]
    leaves = [
        randn(total, heads, 64, seed=total + heads).to(exact.device, dtype).requires_grad_()
        for total, heads in ((total_q, 2), (total_k, 1), (total_k, 1))
    ]
    leaves.append(far_bias(2, 1, total_k).to(exact.device).requires_grad_())
    mask: Tensor | IntervalMask | None = None
    if kind == "intervals":
        start = torch.zeros(2, total_k, dtype=torch.int32, device=exact.device)
        mask = IntervalMask(start, start + 20)
    elif kind in ("keys", "rows"):
        mask = torch.rand(1, 1 if kind == "keys" else total_q, max(total_k, max(keys))) < 0.7
        mask = (mask if kind == "keys" else mask[..., : max(keys)]).to(exact.device)
    ends = [
        torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=exact.device)
        for sizes in (queries, keys)
    ]
    options = {"max_seqlen_q": max(queries), "max_seqlen_k": max(keys)}
    found = []
    for backend in (exact.backend, "reference"):
        with poisoned_buffers():
            out = flash_dmattn_varlen_func(
                *leaves[:3], *ends, *options.values(), attn_mask=mask, attn_bias=leaves[3],
                backend=backend,
            )  # fmt: skip
            gradients = torch.autograd.grad(out.float().square().sum(), leaves)
        found.append([out.detach(), *gradients])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=0.05, rtol=0.05)


def masked(kind: str, queries: int, keys: int) -> Tensor | IntervalMask | None:
    generator = torch.Generator().manual_seed(11)
    if kind == "window":
        return IntervalMask.sliding_window(40, 0, queries, keys)
    if kind == "keys":
        return torch.rand(2, 1, 1, keys, generator=generator) < 0.4
    if kind == "rows":
        return torch.rand(1, 2, queries, keys, generator=generator) < 0.3
    return None


def check_sums(
    target: Target, problem: Problem, *, lse_error: float, **options: object
) -> dict[str, Tensor]:
    """Compare all results with float64; the bound of lse is too tight for float32."""
    dtype = problem.query.dtype
    dout = randn(*problem.query.shape, dtype=dtype, seed=5)
    batch, rows, heads, _ = problem.query.shape
    dlse = randn(batch, heads, rows, seed=6).double()
    got = problem.results(target, dout=dout, dlse=dlse, **options)
    truth = problem.truth(dout=dout, dlse=dlse)
    torch.testing.assert_close(got.pop("lse"), truth["lse"], atol=lse_error, rtol=0)
    tolerance = 8 * torch.finfo(dtype).eps
    for name, tensor in got.items():
        largest = max(1.0, float(truth[name].abs().max()))
        torch.testing.assert_close(
            tensor.double(), truth[name], atol=tolerance * largest, rtol=tolerance, msg=name
        )
    return got


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [(2, 2, 2), (4, 2, 2), (4, 2, 4)], ids=str)
@pytest.mark.parametrize("kind", ["none", "causal", "window", "keys", "rows"])
@pytest.mark.parametrize("slope", [1.0, -1.0, 0.0])
def test_steps_of_one_far_away(
    slope: float, kind: str, heads: tuple[int, int, int], deterministic: bool, exact: Target
) -> None:
    """At 7e5 float32 has steps of 0.06; biases rise, fall or are random there."""
    count, kv_heads, bias_heads = heads
    query, key, value = (
        randn(2, 300, h, 64, seed=n, dtype=torch.float16)
        for n, h in enumerate((count, kv_heads, kv_heads))
    )
    near = randn(2, bias_heads, 1, 300, seed=8).double()
    bias = (slope * near.exp().cumsum(-1) if slope else near) - 7e5
    problem = Problem(
        query, key, value, masked(kind, 300, 300), bias, causal=kind in ("causal", "window")
    )
    check_sums(exact, problem, lse_error=4e-3, deterministic=deterministic)


@pytest.mark.parametrize("kind", ["none", "window", "keys"])
@pytest.mark.parametrize("queries", [1, 5, 260])
def test_many_keys_far_away(queries: int, kind: str, exact: Target) -> None:
    query = randn(2, queries, 4, 64, seed=1, dtype=torch.bfloat16)
    key, value = (randn(2, 1100, 2, 64, seed=s, dtype=torch.bfloat16) for s in (2, 3))
    bias = -7e5 - logsigmoid(randn(2, 2, 1, 1100, seed=4).double()).cumsum(-1)
    mask = masked(kind, queries, 1100)
    problem = Problem(query, key, value, mask, bias, causal=True)
    check_sums(exact, problem, lse_error=4e-3)
    tensors = [t.to(exact.device) for t in (query, key, value)]
    _, lse = flash_dmattn_func(
        *tensors, None if mask is None else mask.to(exact.device), bias.to(exact.device),
        is_causal=True, return_lse=True, backend=exact.backend,
    )  # fmt: skip
    wanted = problem.truth(dout=torch.zeros_like(query))["lse"]
    torch.testing.assert_close(lse.cpu(), wanted, atol=4e-3, rtol=0)


def test_each_tile_of_rows_has_a_reference_of_its_own(exact: Target) -> None:
    """Adjacent keys belong to row tiles with biases of different magnitude."""
    tiles = torch.randint(0, 3, (2, 2, 384), generator=torch.Generator().manual_seed(3))
    mask = IntervalMask((128 * tiles).int(), (128 * tiles + 128).int())
    bias = 1e6 * tiles.double().unsqueeze(2) + randn(2, 2, 1, 384, seed=9).double()
    query, key, value = (randn(2, 384, h, 64, seed=h, dtype=torch.float16) for h in (4, 2, 2))
    for options in ({}, {"deterministic": True}):
        problem = Problem(query, key, value, mask, bias)
        check_sums(exact, problem, lse_error=4e-3, **options)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("windowed", [False, True])
def test_packed_sequences_far_away(windowed: bool, deterministic: bool, exact: Target) -> None:
    """Sequences of several tiles, and one without rows."""
    starts, total = [0, 150, 150, 440], 440
    bounds = torch.tensor(starts, dtype=torch.int32)
    tensors = [randn(total, h, 64, seed=h, dtype=torch.float16) for h in (4, 2, 2)]
    bias = randn(2, 1, total, seed=8).double().exp().cumsum(-1) - 7e5
    dlse = randn(4, total, seed=6).double()
    mask = None
    if windowed:
        own = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(starts)])
        mask = IntervalMask(own.int()[None], (own + 60).int()[None])
    results = []
    for on in (exact.device, "cpu"):
        is_truth = len(results) == 1
        leaves = [t.to(on).requires_grad_() for t in (*tensors, bias)]
        if is_truth:
            leaves = [t.detach().double().requires_grad_() for t in leaves]
            out, lse = attention_reference(
                *leaves[:3], mask, leaves[3], causal=True, cu_seqlens_q=bounds, cu_seqlens_k=bounds
            )
        else:
            out, lse = flash_dmattn_varlen_func(
                *leaves[:3], bounds.to(on), bounds.to(on), 290, 290,
                attn_mask=None if mask is None else mask.to(on), attn_bias=leaves[3],
                is_causal=True, return_lse=True, deterministic=deterministic,
                backend=exact.backend,
            )  # fmt: skip
        grads = torch.autograd.grad(out.sum() + (lse * dlse.to(on)).sum(), leaves)
        results.append([t.detach().cpu().double() for t in (out, lse, *grads)])
    (out, lse, *grads), (wanted, wanted_lse, *truth) = results
    torch.testing.assert_close(lse, wanted_lse, atol=4e-3, rtol=0)
    tolerance = 8 * torch.finfo(torch.float16).eps
    for one, other in zip([out, *grads], [wanted, *truth], strict=True):
        largest = max(1.0, float(other.abs().max()))
        torch.testing.assert_close(one, other, atol=tolerance * largest, rtol=tolerance)


@pytest.mark.parametrize("kind", ["none", "window", "keys", "sink", "softcap"])
def test_key_mass_far_away(kind: str, exact: Target) -> None:
    """The rows form several tiles, each with its own reference bias."""
    query, key = (
        randn(2, 300, h, 64, seed=h, dtype=torch.float16).to(exact.device) for h in (4, 2)
    )
    bias = randn(2, 2, 1, 300, seed=8).double().exp().cumsum(-1) - 7e5
    options: dict[str, Any] = {"is_causal": True, "return_key_mass": True}
    options["attn_bias"] = bias.to(exact.device)
    if kind == "sink":
        options["sink"] = torch.tensor([-7e5, -6.999e5, 0.0, -1e6]).to(exact.device)
    if kind == "softcap":
        options["softcap"] = 2.0
    for rows in (300, 1):
        mask = masked(kind, rows, 300)
        options["attn_mask"] = None if mask is None else mask.to(exact.device)
        tensors = (query[:, :rows], key, key)
        mass = flash_dmattn_func(*tensors, backend=exact.backend, **options)[-1]
        wanted = flash_dmattn_func(*map(Tensor.double, tensors), backend="reference", **options)[-1]
        torch.testing.assert_close(mass, wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("length", [1 << 14, pytest.param(1 << 20, marks=pytest.mark.slow)])
def test_gates_of_a_long_sequence(length: int, exact: Target) -> None:
    """The last rows of a sequence; float32 would round their bias by up to 0.03 at 1M tokens."""
    if exact.backend == "reference" and length > 1 << 16:
        pytest.skip("the reference is what it would be compared with")
    rows, dtype = 40, torch.bfloat16
    query = randn(1, rows, 2, 16, seed=1, dtype=dtype)
    key, value = (randn(1, length, 1, 16, seed=s, dtype=dtype) for s in (2, 3))
    bias = -logsigmoid(randn(1, 2, 1, length, seed=4).double()).cumsum(-1)
    problem = Problem(query, key, value, None, bias, causal=True)
    dout = randn(*query.shape, dtype=dtype, seed=5)
    got, truth = problem.results(exact, dout=dout), problem.truth(dout=dout)
    # PyTorch gets only the difference to the first of these rows, which determines the result.
    first = bias[..., -rows : -rows + 1]
    near = Problem(query, key, value, None, (bias - first).to(dtype), causal=True)
    eager = near.eager(dout=dout)
    for part in (got, truth):
        part["lse"] = part["lse"] - first[..., 0]
    assert_accurate(got, truth, eager)


def call(target: Target, bias: Tensor, **changes: Any) -> Any:
    query = randn(2, 5, 4, 8, dtype=target.dtypes[-1]).to(target.device)
    key, value = (randn(2, 7, 2, 8, dtype=target.dtypes[-1]).to(target.device) for _ in range(2))
    arguments = {"attn_bias": bias.to(target.device), "backend": target.backend, **changes}
    return flash_dmattn_func(query, key, value, **arguments)


def test_what_float64_is_not_for(exact: Target) -> None:
    with pytest.raises(
        TypeError, match=r"attn_bias has dtype float64, but one with a row for each"
    ):
        call(exact, torch.zeros(2, 1, 5, 7, dtype=torch.float64))
    if exact.backend == "reference":
        return  # its selection is by float64
    per_key = torch.zeros(2, 2, 1, 7, dtype=torch.float64)
    with pytest.raises(
        TypeError, match=r"attn_bias has dtype torch\.float64, which kernels do not"
    ):
        call(exact, per_key, window_size=3, is_causal=True)
    with pytest.raises(TypeError, match=r"attn_bias has dtype torch\.float64"):
        dynamic_mask(per_key, 3, backend=exact.backend)


def test_with_a_plan_and_probabilities(exact: Target) -> None:
    query = randn(2, 5, 4, 8, dtype=exact.dtypes[-1]).to(exact.device)
    key, value = (randn(2, 5, 4, 8, dtype=query.dtype, seed=s).to(exact.device) for s in (1, 2))
    mask = IntervalMask.sliding_window(2, 0, 5, 5, device=exact.device)
    bias = far_bias(2, 4, 1, 5).to(exact.device).requires_grad_()
    plan = make_plan(query, key, mask, is_causal=True, backend=exact.backend)
    for need_lse in (False, True):
        made = flash_dmattn_func(query, key, value, attn_bias=bias, plan=plan, return_lse=need_lse)
        out = made[0] if need_lse else made
        wanted, _, probabilities = flash_dmattn_func(
            query, key, value, mask, bias, is_causal=True, return_attn_probs=True,
            backend=exact.backend,
        )  # fmt: skip
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(
            probabilities.sum(-1).float(), torch.ones(2, 4, 5, device=out.device),
            atol=2e-2, rtol=0,
        )  # fmt: skip
        (grad,) = torch.autograd.grad(out.sum(), bias)
        (other,) = torch.autograd.grad(wanted.sum(), bias)
        torch.testing.assert_close(grad, other, atol=1e-6, rtol=1e-4)


def test_the_operator_tells_what_it_returns(exact: Target) -> None:
    query = randn(2, 5, 4, 12, dtype=exact.dtypes[0]).to(exact.device).requires_grad_()
    key, value = (randn(2, 5, 4, 12, dtype=query.dtype, seed=s).to(exact.device) for s in (1, 2))
    bias = far_bias(2, 4, 1, 5).to(exact.device).requires_grad_()
    inputs = AttentionInputs(query, key, value, bias=bias, causal=True)
    assert attention(inputs, exact.backend, need_lse=True)[1] is not None
    torch.library.opcheck(
        torch.ops.flash_dmattn.attention_forward.default, (*inputs, exact.backend, True)
    )


def test_who_cannot_read_it_says_so(target: Target) -> None:
    bias = torch.zeros(2, 2, 1, 7, dtype=torch.float64)
    if reads_float64(target):
        assert call(target, bias).isfinite().all()
        return
    with pytest.raises(NotImplementedError, match=r"attn_bias has dtype (torch\.)?float64, which"):
        call(target, bias)
