# SPDX-License-Identifier: BSD-3-Clause
"""Empty rows and sizes, poisoned keys, extreme biases, unusual gradients and views."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flash_dmattn
from flash_dmattn import IntervalMask, flash_dmattn_func
from support import (
    Target,
    assert_accurate,
    check,
    cotangent,
    moved,
    rand_bool,
    randn,
    reads_float64,
    simple_problem,
)


@pytest.mark.parametrize("kind", ["keys", "rows", "intervals", "causal", "bias"])
def test_empty_rows_are_zero_and_have_zero_gradients(kind: str, target: Target) -> None:
    for dtype in target.dtypes:
        problem = simple_problem(dtype, batch=1, queries=70, keys=30)
        empty = torch.zeros(70, dtype=torch.bool)
        if kind == "keys":
            problem.mask = torch.zeros(1, 1, 1, 30, dtype=torch.bool)
            empty[:] = True
        elif kind == "rows":
            problem.mask = rand_bool(1, 1, 70, 30)
            problem.mask[:, :, 5:40] = False
            empty[5:40] = True
        elif kind == "intervals":
            start = torch.full((1, 1, 30), 12, dtype=torch.int32)
            problem.mask = IntervalMask(start, start + 20)
            empty[:12], empty[32:] = True, True
        elif kind == "causal":
            problem.causal = True
            empty[:40] = True
        else:
            problem.bias = torch.full((1, 1, 70, 30), -torch.inf, dtype=dtype)
            problem.bias[:, :, 3] = 0
            empty[:], empty[3] = True, False
        dout = randn(*problem.query.shape, dtype=dtype)
        got = problem.results(target, dout=dout)
        assert torch.equal(got["out"][:, empty], torch.zeros_like(got["out"][:, empty]))
        assert (got["lse"][:, :, empty] == -torch.inf).all()
        assert torch.equal(got["dquery"][:, empty], torch.zeros_like(got["dquery"][:, empty]))
        assert got["lse"][:, :, ~empty].isfinite().all()
        check(problem, target)


@pytest.mark.parametrize("kind", ["rows", "intervals", "causal", "bias"])
def test_empty_rows_are_zero_beside_values_that_are_not_finite(kind: str, target: Target) -> None:
    """Other rows of their tile keep non-finite values; a probability of 0 must not spread them."""
    if target.backend == "flex":
        pytest.skip("FlexAttention multiplies values by probabilities of 0")
    for dtype in target.dtypes:
        problem = simple_problem(dtype, batch=1, queries=20, keys=20)
        empty = torch.arange(20) < 10
        kept = ~empty[:, None].expand(20, 20)
        if kind == "rows":
            problem.mask = kept[None, None].clone()
        elif kind == "intervals":
            start = torch.full((1, 1, 20), 10, dtype=torch.int32)
            problem.mask = IntervalMask(start, start + 10)
        elif kind == "causal":
            problem.causal = True
            problem.mask = (torch.arange(20) >= 10)[None, None, None]
        else:
            problem.bias = torch.zeros(1, 1, 20, 20, dtype=dtype).masked_fill(~kept, -torch.inf)
        problem.value[:, 10:13] = torch.tensor([torch.nan, torch.inf, -torch.inf])[:, None, None]
        got = problem.results(target, dout=torch.zeros_like(problem.query))
        assert torch.equal(got["out"][:, empty], torch.zeros_like(got["out"][:, empty]))
        assert not got["out"][:, 13:].isfinite().any()


@pytest.mark.parametrize("queries, keys", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("kind", ["none", "keys", "rows", "intervals"])
def test_no_queries_or_no_keys(queries: int, keys: int, kind: str, target: Target) -> None:
    problem = simple_problem(target.dtypes[0], queries=queries, keys=keys)
    problem.bias = randn(2, 2, 1, keys)
    if kind == "keys":
        problem.mask = rand_bool(2, 1, 1, keys)
    elif kind == "rows":
        problem.mask = rand_bool(2, 1, queries, keys)
    elif kind == "intervals":
        problem.mask = IntervalMask.sliding_window(2, 2, queries, keys)
    check(problem, target)


def test_no_batch(target: Target) -> None:
    problem = simple_problem(target.dtypes[0], batch=0)
    got = problem.results(target, dout=torch.zeros_like(problem.query))
    assert got["out"].shape == problem.query.shape
    assert got["dkey"].shape == problem.key.shape


def test_no_batch_with_a_bias_that_a_batch_would_share(target: Target) -> None:
    problem = simple_problem(target.dtypes[0], batch=0, queries=128, keys=128)
    problem.bias = randn(1, 4, 128, 128, dtype=target.dtypes[0])
    got = problem.results(target, dout=torch.zeros_like(problem.query))
    assert got["dquery"].shape == problem.query.shape
    assert not got["dbias"].any()


@pytest.mark.parametrize("kind", ["keys", "rows", "intervals", "bias"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_dropped_keys_are_never_read(kind: str, poison: float, target: Target) -> None:
    for dtype in target.dtypes:
        problem = simple_problem(dtype, queries=50, keys=70, causal=True)
        dropped = torch.arange(70) % 3 == 1
        problem.bias = randn(1, 1, 1, 70, dtype=dtype)
        if kind == "keys":
            problem.mask = ~dropped.expand(2, 1, 1, 70)
        elif kind == "rows":
            problem.mask = rand_bool(2, 1, 50, 70) & ~dropped
        elif kind == "intervals":
            end = (~dropped * 50).to(torch.int32)[None, None]
            problem.mask = IntervalMask(torch.zeros_like(end), end)
        else:
            problem.bias[..., dropped] = -torch.inf
        dout = randn(*problem.query.shape, dtype=dtype)
        clean = problem.results(target, dout=dout)
        problem.key[:, dropped] = poison
        problem.value[:, dropped] = poison
        if kind != "bias":
            problem.bias[..., dropped] = poison
        poisoned = problem.results(target, dout=dout)
        for name, value in clean.items():
            assert torch.equal(poisoned[name], value), name


def test_keys_after_the_causal_limit_are_never_read(target: Target) -> None:
    """With Q < K some row sees every key; with a mask no row may see the last keys."""
    problem = simple_problem(target.dtypes[0], queries=40, keys=40, causal=True)
    problem.mask = IntervalMask.sliding_window(None, None, 40, 40)
    problem.mask.end[..., 35:] = 30
    dout = randn(*problem.query.shape)
    clean = problem.results(target, dout=dout)
    problem.key[:, 35:], problem.value[:, 35:] = torch.nan, torch.nan
    poisoned = problem.results(target, dout=dout)
    for name, value in clean.items():
        assert torch.equal(poisoned[name], value), name


@pytest.mark.parametrize("rows", [1, 40])
def test_bias_of_minus_infinity_is_not_kept(rows: int, target: Target) -> None:
    for dtype in target.dtypes:
        problem = simple_problem(dtype, queries=40, keys=60)
        bias = randn(2, 4, rows, 60, dtype=dtype, seed=3)
        kept = rand_bool(2, 4, rows, 60, density=0.3)
        problem.bias = bias.masked_fill(~kept, -torch.inf)
        dout = randn(*problem.query.shape, dtype=dtype)
        by_bias = problem.results(target, dout=dout)
        problem.bias, problem.mask = bias, kept
        by_mask = problem.results(target, dout=dout)
        # A pack may use other tiles for the two forms, and thus another order of summation.
        eps = torch.finfo(dtype).eps
        tolerance = {"atol": max(1e-5, eps), "rtol": max(1.3e-6, 2 * eps)}
        for name, value in by_mask.items():
            torch.testing.assert_close(by_bias[name], value, **tolerance)


@pytest.mark.parametrize("form", ["keys", "rows", "float64", "listed"])
def test_lse_of_a_bias_of_infinity(form: str, target: Target) -> None:
    """It is that of torch.logsumexp: +inf, and NaN if a score is NaN. All other results are NaN."""
    if form == "float64" and not reads_float64(target):
        pytest.skip("the backend has no float64 biases")
    if form == "listed" and target.backend == "flex":
        pytest.skip("the backend has no key lists")
    for dtype in target.dtypes:
        query, key, value = (randn(2, 40, 2, 16, dtype=dtype, seed=seed) for seed in range(3))
        bias = randn(2, 2, 1 if form in ("keys", "float64") else 40, 40, seed=3)
        if form == "float64":
            bias = bias.double()
        bias[0, 0, -1, 7] = bias[1, 1, -1, 30] = torch.inf
        bias[1, 1, -1, 5] = torch.nan
        bias[1, 0, -1, 9] = 300.0  # a large lse
        leaves = [moved(t, target.device, None).requires_grad_() for t in (query, key, value, bias)]
        if form == "listed":
            listed = torch.arange(40, dtype=torch.int32).expand(2, 1, 40, 40).to(target.device)
            options: dict[str, Any] = {"key_indices": listed, "index_bias": leaves[3]}
        else:
            options = {"attn_bias": leaves[3]}
        out, lse = flash_dmattn_func(
            *leaves[:3], return_lse=True, backend=target.backend, **options
        )
        dquery, dbias = torch.autograd.grad(out.sum() + lse.sum(), [leaves[0], leaves[3]])
        with torch.no_grad():
            scores = query.float().transpose(1, 2) @ key.float().permute(0, 2, 3, 1) / 4 + bias
        want = scores.logsumexp(-1)
        if target.is_pack and target.has_kernels_of_gpu:
            want[want == torch.inf] = torch.nan  # the sum of a row's exponentials is NaN
        torch.testing.assert_close(
            lse.cpu(), want.to(lse.dtype), atol=1e-2, rtol=1e-2, equal_nan=True
        )
        spoilt = ~want.isfinite()
        assert out.cpu().transpose(1, 2)[spoilt].isnan().all()
        assert out.cpu().transpose(1, 2)[~spoilt].isfinite().all()
        assert dquery.cpu().transpose(1, 2)[spoilt].isnan().all()
        assert dquery.cpu().transpose(1, 2)[~spoilt].isfinite().all()
        assert dbias.cpu()[bias == torch.inf].isnan().all()


@pytest.mark.parametrize("whole_row", [False, True])
def test_smallest_finite_bias(whole_row: bool, target: Target) -> None:
    for dtype in target.dtypes:
        problem = simple_problem(dtype, queries=40, keys=60)
        problem.bias = randn(1, 1, 40, 60, dtype=dtype)
        problem.bias[:, :, ::2, slice(None) if whole_row else slice(0, 30)] = torch.finfo(dtype).min
        dout = randn(*problem.query.shape, dtype=dtype)
        got, truth = problem.results(target, dout=dout), problem.truth(dout=dout)
        if whole_row:
            # The bias absorbs the scores in any dtype below float64, so only the rest is compared.
            assert all(not value.isnan().any() for value in got.values())
            torch.testing.assert_close(
                got["out"][:, 1::2].double(), truth["out"][:, 1::2], atol=2e-2, rtol=2e-2
            )
        else:
            assert_accurate(got, truth, problem.eager(dout=dout))


@pytest.mark.parametrize("rows", [1, 40])
def test_lse_of_low_biases(rows: int, target: Target) -> None:
    """Only a bias below -2.35e38, such as finfo.min, may be raised."""
    for dtype in target.dtypes:
        problem = simple_problem(dtype, queries=40, keys=60)
        tensors = [t.to(target.device) for t in (problem.query, problem.key, problem.value)]
        bias = torch.full((1, 1, rows, 60), -2e38, device=target.device)
        _, lse = flash_dmattn_func(
            *tensors, attn_bias=bias, return_lse=True, backend=target.backend
        )
        torch.testing.assert_close(lse, torch.full_like(lse, -2e38))


@pytest.mark.parametrize("scale", [1e-8, 0.1, 4e8, 7e8])
def test_lowest_biases_behind_dropped_keys(scale: float, pack_target: Target) -> None:
    """They are finite, so their keys are kept, even after keys that a row drops."""
    for dtype in pack_target.dtypes:
        for bias_dtype in {dtype, torch.float32}:
            problem = simple_problem(dtype, queries=40, keys=333, scale=scale)
            problem.query.zero_()
            problem.bias = torch.full((1, 1, 1, 333), -torch.inf, dtype=bias_dtype)
            problem.bias[..., 140:] = torch.finfo(bias_dtype).min
            out = problem.results(pack_target, dout=torch.zeros_like(problem.query))["out"]
            mean = problem.value[:, 140:].double().mean(1).repeat_interleave(2, 1)
            tolerance = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(
                out.double(), mean[:, None].expand(out.shape), rtol=tolerance, atol=tolerance
            )


def test_gradient_of_the_bias_alone(target: Target) -> None:
    problem = simple_problem(target.dtypes[0], causal=True)
    problem.bias = randn(2, 2, 1, 23, seed=8).to(target.dtypes[0])
    dout = randn(*problem.query.shape).to(target.dtypes[0])
    everything = problem.results(target, dout=dout)
    bias = problem.bias.to(target.device).requires_grad_()
    tensors = [t.to(target.device) for t in (problem.query, problem.key, problem.value)]
    out = flash_dmattn_func(*tensors, None, bias, is_causal=True, backend=target.backend)
    out.backward(dout.to(target.device))
    torch.testing.assert_close(bias.grad.cpu(), everything["dbias"])


@pytest.mark.parametrize("wanted", ["query", "key", "value"])
def test_gradient_of_one_tensor_alone(wanted: str, target: Target) -> None:
    problem = simple_problem(target.dtypes[0], causal=True)
    problem.bias = randn(2, 2, 1, 23, seed=8).to(target.dtypes[0])
    dout = randn(*problem.query.shape).to(target.dtypes[0])
    everything = problem.results(target, dout=dout)
    tensors = {n: t.to(target.device) for n, t in vars(problem).items() if isinstance(t, Tensor)}
    tensors[wanted].requires_grad_()
    bias = tensors.pop("bias")
    out = flash_dmattn_func(**tensors, attn_bias=bias, is_causal=True, backend=target.backend)
    out.backward(dout.to(target.device))
    torch.testing.assert_close(tensors[wanted].grad.cpu(), everything[f"d{wanted}"])


def test_gradient_of_lse_alone(target: Target) -> None:
    problem = simple_problem(target.dtypes[0], causal=True)
    leaves = problem.leaves(target.device, None)
    _, lse = flash_dmattn_func(
        *leaves.values(), is_causal=True, return_lse=True, backend=target.backend
    )
    lse.sum().backward()
    exact = problem.leaves("cpu", torch.float64)
    flash_dmattn.attention_reference(*exact.values(), causal=True)[1].sum().backward()
    for name in ("query", "key"):
        torch.testing.assert_close(
            leaves[name].grad.cpu().double(), exact[name].grad, atol=1e-2, rtol=1e-2
        )
    assert not leaves["value"].grad.any()


@pytest.mark.parametrize("kind", ["expanded", "sliced", "transposed"])
def test_gradient_of_out_with_any_strides(kind: str, target: Target) -> None:
    problem = simple_problem(target.dtypes[0])
    shape = problem.query.shape
    dense = cotangent(randn(*shape)).to(target.dtypes[0])
    if kind == "expanded":
        dout = dense[:, :1, :1, :1].expand(shape)
    elif kind == "sliced":
        dout = cotangent(randn(*shape[:3], 2 * shape[3])).to(target.dtypes[0])[..., ::2]
    else:
        dout = dense.transpose(1, 3).contiguous().transpose(1, 3)
    assert_accurate(
        problem.results(target, dout=dout), problem.truth(dout=dout), problem.eager(dout=dout)
    )


def test_merging_two_halves_by_lse(target: Target) -> None:
    """lse merges attention over parts of the keys into attention over all keys."""
    problem = simple_problem(target.dtypes[0], keys=40)
    query, key, value = (t.to(target.device) for t in (problem.query, problem.key, problem.value))
    options = {"return_lse": True, "backend": target.backend}
    whole, lse = flash_dmattn_func(query, key, value, **options)
    parts = [
        flash_dmattn_func(query, key[:, part], value[:, part], **options)
        for part in (slice(0, 13), slice(13, None))
    ]
    torch.testing.assert_close(torch.logaddexp(parts[0][1], parts[1][1]), lse)
    merged = sum(o.float() * torch.exp(s - lse).transpose(1, 2).unsqueeze(-1) for o, s in parts)
    torch.testing.assert_close(merged, whole.float(), atol=2e-3, rtol=2e-3)


def test_expanded_mask_and_bias_equal_their_copies(target: Target) -> None:
    problem = simple_problem(target.dtypes[0])
    mask, bias = rand_bool(2, 1, 1, 23), randn(1, 2, 1, 23).to(target.dtypes[0])
    dout = randn(*problem.query.shape)
    problem.mask, problem.bias = mask.expand(2, 4, 17, 23), bias.expand(2, 2, 17, 23)
    views = problem.results(target, dout=dout)
    problem.mask, problem.bias = problem.mask.contiguous(), problem.bias.contiguous()
    for name, value in problem.results(target, dout=dout).items():
        torch.testing.assert_close(views[name], value, msg=name)


def test_negated_and_parameter_inputs(target: Target) -> None:
    """A lazy negation is not visible in the strides; parameters are not plain tensors."""
    problem = simple_problem(target.dtypes[0])
    query, key, value = (t.to(target.device) for t in (problem.query, problem.key, problem.value))
    expected = flash_dmattn_func(-query, key, value, backend=target.backend)
    negated = torch._neg_view(query)
    assert torch.equal(flash_dmattn_func(negated, key, value, backend=target.backend), expected)
    with torch.no_grad():
        parameter = torch.nn.Parameter(-query)
        got = flash_dmattn_func(parameter, key, value, backend=target.backend)
    assert torch.equal(got, expected)
