# SPDX-License-Identifier: BSD-3-Clause
"""Results and gradients against float64, over all arguments of a call."""

from __future__ import annotations

import pytest
import torch

import flash_dmattn
from support import Problem, Target, check, rand_bool, randn, simple_problem


@pytest.mark.parametrize("head_dim", [1, 3, 16, 40, 64, 100, 128, 256])
def test_head_dims(head_dim: int, target: Target) -> None:
    for dtype in target.dtypes:
        problem = simple_problem(dtype, queries=70, keys=75, head_dim=head_dim, causal=True)
        problem.bias = randn(2, 2, 1, 75, dtype=dtype, seed=5)
        problem.mask = rand_bool(2, 2, 1, 75, density=0.4)
        check(problem, target)


@pytest.mark.parametrize("kv_heads, group", [(1, 1), (4, 1), (1, 8), (2, 3), (3, 5)])
@pytest.mark.parametrize("mask_heads", ["one", "kv", "query"])
def test_grouped_heads(kv_heads: int, group: int, mask_heads: str, target: Target) -> None:
    heads = {"one": 1, "kv": kv_heads, "query": kv_heads * group}[mask_heads]
    problem = simple_problem(target.dtypes[0], kv_heads=kv_heads, group=group, queries=33, keys=40)
    problem.mask = rand_bool(2, heads, 33, 40)
    problem.bias = randn(1, heads, 1, 40, dtype=target.dtypes[0], seed=9)
    check(problem, target)


@pytest.mark.parametrize("queries, keys", [(1, 300), (300, 1), (5, 130), (130, 5), (257, 257)])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_causal_is_aligned_to_the_bottom_right(
    queries: int, keys: int, softcap: float, target: Target
) -> None:
    for dtype in target.dtypes:
        check(
            simple_problem(
                dtype, batch=1, queries=queries, keys=keys, causal=True, softcap=softcap
            ),
            target,
        )


@pytest.mark.parametrize("queries, keys", [(700, 700), (600, 901), (901, 600)])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("head_dim", [64, 192, 256])
def test_groups_over_many_tiles_without_a_mask(
    head_dim: int, causal: bool, queries: int, keys: int, pack_target: Target
) -> None:
    """Kernels that walk the rows of all heads of a group start in the middle of them."""
    problem = simple_problem(
        pack_target.dtypes[0],
        batch=1,
        queries=queries,
        keys=keys,
        kv_heads=1,
        group=3,
        head_dim=head_dim,
        causal=causal,
    )
    check(problem, pack_target)


def test_causal_equals_its_mask(target: Target) -> None:
    problem = simple_problem(target.dtypes[0], queries=20, keys=33)
    mask = torch.ones(20, 33, dtype=torch.bool).tril(13)[None, None]
    dout = randn(*problem.query.shape)
    causal = Problem(problem.query, problem.key, problem.value, causal=True)
    masked = Problem(problem.query, problem.key, problem.value, mask)
    for name, value in causal.results(target, dout=dout).items():
        torch.testing.assert_close(value, masked.results(target, dout=dout)[name])


def test_large_scores_do_not_overflow(target: Target) -> None:
    for dtype in target.dtypes:
        problem = simple_problem(dtype, scale=40.0, queries=40, keys=80)
        check(problem, target)


def test_long_sequence_with_few_kept_keys(target: Target) -> None:
    dtype = target.dtypes[0]
    problem = simple_problem(dtype, batch=1, queries=600, keys=600, causal=True)
    problem.bias = randn(1, 2, 1, 600, dtype=dtype, seed=7)
    problem.mask = flash_dmattn.dynamic_mask(problem.bias, 32, True, backend="reference")
    check(problem, target)


@pytest.mark.parametrize("queries", [0, 1, 100])
def test_documents_of_a_packed_row(queries: int, target: Target) -> None:
    ids = torch.arange(queries).div(13, rounding_mode="floor")[None]
    problem = simple_problem(target.dtypes[0], batch=1, queries=queries, keys=queries, causal=True)
    problem.mask = flash_dmattn.IntervalMask.documents(ids)
    check(problem, target)


def test_block_diagonal_boolean_mask(target: Target) -> None:
    """Empty tiles between tiles with kept pairs."""
    block = torch.arange(256).div(64, rounding_mode="floor")
    for dtype in target.dtypes:
        problem = simple_problem(dtype, batch=1, queries=256, keys=256)
        problem.mask = (block[:, None] == block)[None, None]
        problem.bias = randn(1, 1, 256, 256, dtype=dtype, seed=4)
        check(problem, target)


@pytest.mark.parametrize("head_dim", [192, 256], ids=["cpu-cpu-192", "cpu-cpu-256"])
def test_scores_of_long_head_dimensions(head_dim: int) -> None:
    """The cpu pack sums a score in parts, which rounds less than one running sum."""
    query, key = randn(1, 2000, 1, head_dim), randn(1, 1, 1, head_dim, seed=1)
    # The log-sum-exp of a single key is its score.
    _, lse = flash_dmattn.flash_dmattn_func(
        query, key, key, softmax_scale=1.0, return_lse=True, backend="cpu"
    )
    running = torch.zeros(2000)
    for product in (query * key)[0, :, 0].unbind(-1):
        running += product
    exact = (query.double() * key.double()).sum(-1)[0, :, 0]
    error, running_error = ((x - exact).square().mean() for x in (lse[0, 0], running))
    assert error < 0.6 * running_error
