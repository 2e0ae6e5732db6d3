# SPDX-License-Identifier: BSD-3-Clause
"""Few queries over many keys (decode): groups of heads, divided columns, paged caches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_dmattn import IntervalMask, flash_dmattn_func, flash_dmattn_varlen_func
from support import Problem, Target, check, rand_bool, randn, simple_problem

# Enough keys for a GPU to divide them over thread blocks.
MANY_KEYS = 2100


def with_mask(problem: Problem, kind: str, heads: int, density: float = 0.3) -> Problem:
    queries, keys = problem.query.shape[1], problem.key.shape[1]
    if kind == "keys":
        problem.mask = rand_bool(1, heads, 1, keys, density=density, seed=5)
    elif kind == "rows":
        problem.mask = rand_bool(1, heads, queries, keys, density=density, seed=5)
    elif kind == "intervals":
        bounds = [
            torch.randint(
                -1, queries + 2, (1, heads, keys), generator=torch.Generator().manual_seed(seed)
            ).to(torch.int32)
            for seed in (6, 7)
        ]
        problem.mask = IntervalMask(torch.minimum(*bounds), torch.maximum(*bounds))
    return problem


@pytest.mark.parametrize("group", [1, 2, 4, 7, 8, 32])
@pytest.mark.parametrize("kind", ["none", "keys", "rows", "intervals"])
def test_groups_of_heads(kind: str, group: int, target: Target) -> None:
    for queries, causal in ((1, False), (3, True)):
        problem = simple_problem(
            target.dtypes[-1], queries=queries, keys=300, group=group, head_dim=64, causal=causal
        )
        problem.bias = randn(1, 2, 1, 300, dtype=problem.query.dtype, seed=8)
        check(with_mask(problem, kind, 2), target)


@pytest.mark.parametrize("density", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["keys", "rows", "intervals"])
def test_divided_columns(kind: str, density: float, target: Target) -> None:
    """With few kept keys, some thread blocks have no columns."""
    problem = simple_problem(
        target.dtypes[-1], batch=1, queries=2, keys=MANY_KEYS, group=4, head_dim=32, causal=True
    )
    check(with_mask(problem, kind, 1, density), target)


@settings(max_examples=60)
@given(data=st.data())
def test_any_decode_problem(data: st.DataObject, target: Target) -> None:
    draw = data.draw
    problem = simple_problem(
        draw(st.sampled_from(target.dtypes)),
        batch=draw(st.integers(1, 3)),
        queries=draw(st.sampled_from([1, 1, 1, 2, 4, 5, 16, 17])),
        keys=draw(st.one_of(st.integers(0, 200), st.sampled_from([511, 512, 1025, MANY_KEYS]))),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 3, 4, 8, 16])),
        head_dim=draw(st.sampled_from([1, 8, 20, 64, 100, 128, 256])),
        causal=draw(st.booleans()),
        softcap=draw(st.sampled_from([0.0, 5.0])),
    )
    heads, kv_heads, keys = problem.query.shape[2], problem.key.shape[2], problem.key.shape[1]
    head_counts = st.sampled_from(sorted({1, kv_heads, heads}))
    with_mask(
        problem,
        draw(st.sampled_from(["none", "keys", "rows", "intervals"])),
        draw(head_counts),
        draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
    )
    if draw(st.booleans()):
        rows = draw(st.sampled_from([1, problem.query.shape[1]]))
        problem.bias = randn(1, draw(head_counts), rows, keys, seed=9)
        problem.bias[rand_bool(*problem.bias.shape, density=0.1, seed=10)] = -torch.inf
    check(problem, target)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_dropped_keys_are_not_read(poison: float, target: Target) -> None:
    for dtype in target.dtypes:
        problem = simple_problem(
            dtype, batch=1, queries=1, keys=MANY_KEYS, group=4, head_dim=128, causal=True
        )
        problem.mask = rand_bool(1, 2, 1, MANY_KEYS, density=0.1)
        problem.bias = randn(1, 2, 1, MANY_KEYS, dtype=dtype)
        problem.bias[..., 7] = -torch.inf
        unkept = problem.bias[0, :, 0].T.isneginf()
        dropped = ~problem.mask[0, :, 0].T | unkept
        clean = problem.results(target, dout=randn(*problem.query.shape, dtype=dtype))
        problem.key[0][dropped] = poison
        problem.value[0][dropped] = poison
        problem.bias[0, :, 0].T[dropped & ~unkept] = poison
        got = problem.results(target, dout=randn(*problem.query.shape, dtype=dtype))
        for name, value in clean.items():
            assert torch.equal(got[name], value), name


def test_results_repeat_bit_for_bit(pack_target: Target) -> None:
    problem = simple_problem(
        pack_target.dtypes[-1], batch=1, queries=1, keys=4 * MANY_KEYS, group=4, head_dim=64
    )
    with_mask(problem, "keys", 2)
    dout = randn(*problem.query.shape)
    first = problem.results(pack_target, dout=dout, deterministic=True)
    for _ in range(20):
        again = problem.results(pack_target, dout=dout, deterministic=True)
        for name, value in first.items():
            assert torch.equal(again[name], value), name


def test_batches_and_large_batches_agree(pack_target: Target) -> None:
    """In a large batch, columns are not divided."""
    problem = simple_problem(
        pack_target.dtypes[-1], batch=200, queries=1, keys=700, kv_heads=2, group=4, head_dim=64
    )
    problem.mask = rand_bool(200, 2, 1, 700, density=0.2)
    query, key, value, mask = (
        t.to(pack_target.device) for t in (problem.query, problem.key, problem.value, problem.mask)
    )
    whole = flash_dmattn_func(query, key, value, mask, backend=pack_target.backend)
    for b in (0, 57, 199):
        alone = flash_dmattn_func(
            *(t[b : b + 1] for t in (query, key, value, mask)), backend=pack_target.backend
        )
        torch.testing.assert_close(whole[b : b + 1], alone, atol=2e-3, rtol=2e-2)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("group", [1, 4, 7])
def test_sequences_of_different_lengths(group: int, paged: bool, target: Target) -> None:
    dtype, page, head_dim = target.dtypes[-1], 64, 128
    k_lengths = [1500, 0, 1, 64, 777]
    query = randn(len(k_lengths), 2 * group, head_dim, dtype=dtype)
    key, value = (randn(sum(k_lengths), 2, head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
    mask = rand_bool(2, 1, sum(k_lengths), density=0.4)
    bias = randn(2, 1, sum(k_lengths), dtype=dtype, seed=3)
    bounds = [
        torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        for lengths in ([1] * len(k_lengths), k_lengths)
    ]
    cache, table = {"key": key, "value": value}, None
    if paged:
        table, pages = into_pages(k_lengths, page, key, value)
        cache = dict(zip(("key", "value"), pages, strict=True))
        table = table.to(target.device)
    out, lse = flash_dmattn_varlen_func(
        query.to(target.device),
        *(t.to(target.device) for t in cache.values()),
        *(b.to(target.device) for b in bounds),
        1,
        max(k_lengths),
        is_causal=True,
        attn_mask=mask.to(target.device),
        attn_bias=bias.to(target.device),
        block_table=table,
        return_lse=True,
        backend=target.backend,
    )
    for b in range(len(k_lengths)):
        keys = slice(int(bounds[1][b]), int(bounds[1][b + 1]))
        want, want_lse = flash_dmattn_func(
            *(t[None].double() for t in (query[b : b + 1], key[keys], value[keys])),
            mask[None, :, :, keys],
            bias[None, :, :, keys].double(),
            return_lse=True,
            backend="reference",
        )
        torch.testing.assert_close(out[b : b + 1].cpu().double(), want[0], atol=1e-2, rtol=2e-2)
        torch.testing.assert_close(
            lse[:, b : b + 1].cpu().double(), want_lse[0], atol=1e-2, rtol=1e-2
        )


def into_pages(
    lengths: list[int], page: int, *tensors: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a block table and paged copies of packed tensors; unused rows hold NaN."""
    counts = [-(-length // page) for length in lengths]
    numbers = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    pages = [
        torch.full((sum(counts), page, *t.shape[1:]), torch.nan, dtype=t.dtype) for t in tensors
    ]
    first, used = 0, 0
    for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for number in range(count):
            table[index, number] = numbers[used]
            rows = slice(first + number * page, first + min(length, (number + 1) * page))
            for paged, tensor in zip(pages, tensors, strict=True):
                paged[numbers[used], : rows.stop - rows.start] = tensor[rows]
            used += 1
        first += length
    return table, pages
