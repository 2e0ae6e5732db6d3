# SPDX-License-Identifier: BSD-3-Clause
"""A bias with a row for each query, with any layout and any sharing of its elements."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_dmattn import IntervalMask, flash_dmattn_varlen_func
from support import (
    Problem,
    Target,
    assert_accurate,
    check,
    rand_bool,
    randn,
    simple_problem,
)


def problem_with(bias: Tensor, dtype: torch.dtype, **settings: object) -> Problem:
    problem = simple_problem(
        dtype, batch=2, queries=bias.shape[2], keys=77, kv_heads=2, group=3, **settings
    )
    problem.bias = bias
    return problem


@pytest.mark.parametrize("queries", [70, 128, 201])
@pytest.mark.parametrize(
    "layout", ["dense", "shifted", "every other", "transposed", "expanded rows", "one column"]
)
def test_elements_anywhere(layout: str, queries: int, target: Target) -> None:
    """Rows and keys at odd and even addresses; elements between them must not be read."""
    for dtype in target.dtypes:
        for bias_dtype in {dtype, torch.float32}:
            elements = randn(2, 2, queries, 77, dtype=bias_dtype, seed=queries)
            if layout == "shifted":
                bias = torch.full((2, 2, queries + 1, 79), torch.nan, dtype=bias_dtype)
                bias = bias[:, :, 1:, 1:78]
            elif layout == "every other":
                bias = torch.full((2, 2, 2 * queries, 154), torch.nan, dtype=bias_dtype)
                bias = bias[:, :, ::2, 1::2]
            elif layout == "transposed":  # with an odd number of elements
                elements = elements[:1, :1]
                bias = torch.empty(1, 1, 77, queries | 1, dtype=bias_dtype)
                bias = bias.transpose(2, 3)[:, :, :queries]
            elif layout == "expanded rows":
                # An expanded bias without a gradient counts as one row for all queries.
                elements = elements[:1, :1, :1]
                bias = torch.empty(1, 1, 1, 77, dtype=bias_dtype)
            elif layout == "one column":
                elements = elements[..., :1]
                bias = torch.empty(2, 2, queries, 1, dtype=bias_dtype)
            else:
                bias = torch.empty(2, 2, queries, 77, dtype=bias_dtype)
            bias.copy_(elements)
            if layout == "expanded rows":
                bias = bias.expand(-1, -1, queries, -1)
            problem = problem_with(bias, dtype, causal=queries == 128)
            if queries == 201:
                problem.mask = rand_bool(2, 2, queries, 77, density=0.4)
            check(problem, target)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize("mask_kind", ["none", "keys", "rows", "rows of heads", "causal"])
@pytest.mark.parametrize("head_dim", [16, 136])
def test_sums_over_what_shares_it(
    head_dim: int, mask_kind: str, heads: int, batch: int, target: Target
) -> None:
    """The gradient of an element is a sum over query heads and batches, up to twelve here."""
    shapes = {"keys": (2, 2, 1, 77), "rows": (1, 1, 150, 77), "rows of heads": (2, 6, 150, 77)}
    for dtype in target.dtypes:
        bias = randn(batch, heads, 150, 77, dtype=dtype, seed=heads)
        bias[rand_bool(*bias.shape, density=0.1)] = -torch.inf
        problem = problem_with(bias, dtype, causal=mask_kind == "causal", head_dim=head_dim)
        if mask_kind in shapes:
            problem.mask = rand_bool(*shapes[mask_kind], density=0.5, seed=batch)
        check(problem, target)


@pytest.mark.parametrize("threads", [1, 3, 16])
@pytest.mark.parametrize("batch, heads", [(1, 1), (1, 3), (1, 6), (3, 1), (3, 3), (3, 6)])
def test_sums_of_any_number_of_threads(batch: int, heads: int, threads: int) -> None:
    """Threads divide the sources of a bias, or divide its rows, or recompute its scores."""
    target = Target("cpu", "cpu")
    problem = simple_problem(
        torch.float32, batch=3, queries=260, keys=157, kv_heads=3, group=2, head_dim=64
    )
    problem.bias = randn(batch, heads, 260, 157, seed=threads)
    problem.mask = rand_bool(3, 3, 260, 157, density=0.5) if heads == 6 else None
    problem.causal = heads == 3
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(problem, target)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("head_dim", [24, 64, 96, 128, 192, 256])
def test_every_tile(head_dim: int, target: Target) -> None:
    """More rows and keys than any tile size, and more heads than Q tiles are stored."""
    for dtype in target.dtypes:
        problem = simple_problem(
            dtype, batch=1, queries=300, keys=333, kv_heads=1, group=3, head_dim=head_dim
        )
        problem.bias = randn(1, 1, 300, 333, dtype=dtype)
        problem.mask = rand_bool(1, 3, 300, 333, density=0.3)
        problem.softcap = 5.0 if head_dim == 96 else 0.0
        check(problem, target)


@pytest.mark.parametrize("head_dim", [16, 136, 256])
def test_dropped_pairs_and_keys_may_hold_anything(head_dim: int, target: Target) -> None:
    for dtype in target.dtypes:
        problem = problem_with(randn(2, 2, 150, 77, dtype=dtype), dtype, head_dim=head_dim)
        problem.mask = rand_bool(2, 2, 150, 77, density=0.5)
        problem.mask[..., 40] = False
        truth_of = problem_with(problem.bias.clone(), dtype, head_dim=head_dim)
        truth_of.mask = problem.mask
        problem.bias[~problem.mask] = torch.nan
        problem.key[:, 40], problem.value[:, 40] = torch.nan, torch.inf
        dout = randn(*problem.query.shape, dtype=dtype, seed=9)
        got = problem.results(target, dout=dout)
        want = truth_of.results(target, dout=dout)
        for name, value in got.items():
            assert torch.equal(value, want[name]), name


@pytest.mark.parametrize("length", [17, 33, 49, 64, 100, 129])
@pytest.mark.parametrize("mask_kind", ["none", "keys", "keys of heads", "rows", "rows of batches"])
def test_many_short_sequences_share_a_bias(mask_kind: str, length: int, target: Target) -> None:
    """As with windows of an image, a thread block processes several sequences side by side."""
    shapes = {
        "keys": (9, 1, 1, length),
        "keys of heads": (9, 4, 1, length),
        "rows": (1, 2, length, length),
        "rows of batches": (9, 1, length, length),
    }
    for dtype in target.dtypes:
        for bias_dtype in {dtype, torch.float32}:
            problem = simple_problem(
                dtype, batch=9, queries=length, keys=length, group=2, head_dim=24
            )
            problem.bias = randn(1, 4, length, length, dtype=bias_dtype)
            if mask_kind in shapes:
                problem.mask = rand_bool(*shapes[mask_kind], density=0.6, seed=length)
            check(problem, target)


@pytest.mark.parametrize("mask_kind", ["none", "keys", "rows"])
def test_enough_windows_to_fill_a_gpu(mask_kind: str, target: Target) -> None:
    """From 1024 sequences x heads on, each of a kernel's two consumers has its own sequence."""
    shapes = {"keys": (515, 1, 1, 50), "rows": (1, 1, 60, 50)}
    for dtype in target.dtypes:
        problem = simple_problem(
            dtype, batch=515, queries=60, keys=50, kv_heads=2, group=1, head_dim=24
        )
        problem.bias = randn(1, 2, 60, 50, dtype=dtype)
        if mask_kind in shapes:
            problem.mask = rand_bool(*shapes[mask_kind], density=0.6, seed=3)
        check(problem, target)


@pytest.mark.parametrize("bias_batch", [1, 3])
@pytest.mark.parametrize("head_dim", [32, 192])
def test_dropped_keys_and_empty_rows_hold_anything(
    head_dim: int, bias_batch: int, target: Target
) -> None:
    """The bias or a key mask drops the keys; other sources of the same bias keep them."""
    for dtype in target.dtypes:
        problem = simple_problem(dtype, batch=3, queries=70, keys=90, group=2, head_dim=head_dim)
        problem.bias = randn(bias_batch, 4, 70, 90, dtype=dtype)
        problem.bias[..., 7] = -torch.inf
        problem.bias[:, :, 11] = -torch.inf
        problem.mask = rand_bool(3, 1, 1, 90, density=0.7)
        problem.mask[..., 40] = False
        dout = randn(*problem.query.shape, dtype=dtype, seed=5)
        want = problem.results(target, dout=dout)
        dropped = ~problem.mask[:, 0, 0]
        dropped[:, 7] = True
        problem.key[dropped], problem.value[dropped] = torch.nan, torch.inf
        problem.query[:, 11], dout[:, 11] = torch.nan, torch.nan
        got = problem.results(target, dout=dout)
        for name, value in got.items():
            assert torch.equal(value, want[name]), name


@pytest.mark.parametrize("bias_batch", [1, 3])
@pytest.mark.parametrize("holder", ["bias of dropped keys", "gradient of empty rows"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("head_dim", [64, 192])
def test_one_thing_that_is_not_a_number(
    head_dim: int, poison: float, holder: str, bias_batch: int, pack_target: Target
) -> None:
    """Other elements are finite, at sizes for which one Hopper kernel computes all gradients."""
    for dtype in pack_target.dtypes:
        for bias_dtype in {dtype, torch.float32}:
            problem = simple_problem(dtype, batch=3, queries=130, keys=200, head_dim=head_dim)
            problem.bias = randn(bias_batch, 4, 130, 200, dtype=bias_dtype)
            problem.bias[:, :, 11] = -torch.inf
            problem.mask = rand_bool(3, 1, 1, 200, density=0.7)
            problem.mask[..., 40:44] = False
            dout = randn(*problem.query.shape, dtype=dtype, seed=5)
            want = problem.results(pack_target, dout=dout)
            if holder == "bias of dropped keys":
                problem.bias[..., 40:44] = poison
            else:
                dout[:, 11] = poison
            got = problem.results(pack_target, dout=dout)
            eps = torch.finfo(dtype).eps
            for name, value in got.items():
                torch.testing.assert_close(value, want[name], rtol=4 * eps, atol=16 * eps)
            assert not got["dbias"][..., 40:44].any()
            assert not got["dquery"][:, 11].any()


@pytest.mark.parametrize("bias_batch, head_dim", [(1, 32), (2, 32), (2, 192)])
def test_rows_of_lowest_biases(bias_batch: int, head_dim: int, target: Target) -> None:
    """They give the mean of their keys' values; on GPUs they have no gradient."""
    for dtype in target.dtypes:
        problem = simple_problem(dtype, batch=2, queries=40, keys=50, group=1, head_dim=head_dim)
        problem.bias = randn(bias_batch, 2, 40, 50, dtype=torch.float32)
        problem.bias[:, :, 3] = torch.finfo(torch.float32).min
        problem.bias[:, :, 5, :49] = torch.finfo(torch.float32).min
        got = problem.results(target, dout=randn(*problem.query.shape, dtype=dtype, seed=5))
        mean, last = problem.value.double().mean(1), problem.value[:, 49].double()
        tolerance = 4 * torch.finfo(dtype).eps
        assert torch.allclose(got["out"][:, 3].double(), mean, rtol=tolerance, atol=tolerance)
        assert torch.allclose(got["out"][:, 5].double(), last, rtol=tolerance, atol=tolerance)
        if target == Target("cuda", "cuda"):
            assert not got["dquery"][:, 3].any()
        assert all(value.isfinite().all() for value in got.values())


@pytest.mark.parametrize("queries", [2, 9, 33])
def test_few_queries_of_a_group(queries: int, target: Target) -> None:
    for dtype in target.dtypes:
        for heads in (1, 6):
            problem = problem_with(randn(2, heads, queries, 77, dtype=dtype), dtype, causal=True)
            check(problem, target)


@pytest.mark.parametrize("heads", [1, 2])
def test_packed_sequences(heads: int, target: Target) -> None:
    """Each sequence equals a separate call; 1500 keys are divided over several thread blocks."""
    lengths = [(130, 1500), (1, 3), (70, 0), (33, 65)]
    (rows, keys), longest = map(sum, zip(*lengths, strict=True)), max(k for _, k in lengths)
    offsets = [torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in zip(*lengths, strict=True)]
    for dtype in target.dtypes:
        query, dout = randn(rows, 4, 16, dtype=dtype), randn(rows, 4, 16, dtype=dtype, seed=1)
        key, value = (randn(keys, 2, 16, dtype=dtype, seed=s) for s in (2, 3))
        bias = randn(heads, rows, longest, dtype=dtype, seed=4)
        leaves = [t.to(target.device).requires_grad_() for t in (query, key, value, bias)]
        out = flash_dmattn_varlen_func(
            *leaves[:3],
            *(o.to(target.device) for o in offsets),
            max(q for q, _ in lengths),
            longest,
            is_causal=True,
            attn_bias=leaves[3],
            backend=target.backend,
        )
        grads = [g.cpu() for g in torch.autograd.grad(out, leaves, dout.to(target.device))]
        for n, (row_count, key_count) in enumerate(lengths):
            row, k = (slice(o[n], o[n] + c) for o, c in zip(offsets, lengths[n], strict=True))
            own = Problem(
                query[None, row],
                key[None, k],
                value[None, k],
                bias=bias[None, :, row, :key_count],
                causal=True,
            )
            cotangents = {"dout": dout[None, row]}
            got = {
                "out": out.detach().cpu()[None, row],
                "dquery": grads[0][None, row],
                "dkey": grads[1][None, k],
                "dvalue": grads[2][None, k],
                "dbias": grads[3][None, :, row, :key_count],
            }
            truth, eager = (of(**cotangents) for of in (own.truth, own.eager))
            assert_accurate(got, *({name: of[name] for name in got} for of in (truth, eager)))
            assert not grads[3][:, row, key_count:].any()
            assert row_count == got["out"].shape[1]


@pytest.mark.parametrize("head_dim", [192, 256])
@pytest.mark.parametrize("form", ["lists", "softcap", "scale", "far below", "transposed"])
def test_forms_of_large_heads(form: str, head_dim: int, target: Target) -> None:
    """A key block then serves a group, whose heads may share a bias."""
    for dtype in target.dtypes:
        for heads, bias_dtype in ((2, dtype), (6, torch.float32)):
            bias = randn(2, heads, 150, 77, dtype=bias_dtype, seed=heads)
            if form == "far below":
                bias[:, :, ::7, 5:] = -1e4
                bias[:, :, 3] = -1e4
            elif form == "transposed":
                bias = bias.transpose(2, 3).contiguous().transpose(2, 3)
            problem = problem_with(bias, dtype, causal=heads == 6, head_dim=head_dim)
            if form == "lists":
                start = torch.randint(0, 120, (2, 2, 77), generator=torch.manual_seed(heads))
                problem.mask = IntervalMask(start.int(), (start + 40).int())
            elif form == "softcap":
                problem.softcap = 3.0
            elif form == "scale":
                problem.scale = 2.0**-34
            check(problem, target)
