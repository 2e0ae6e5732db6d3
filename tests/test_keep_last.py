# SPDX-License-Identifier: BSD-3-Clause
"""The last keys, the first keys, and the best of the others, against a loop over rows and keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawn.problems import bounds
from drawn.source import Source, strided
from flash_dmattn import (
    IntervalMask,
    dynamic_mask,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    make_plan,
)
from flash_dmattn.reference import per_query_head
from support import Target, randn, simple_problem

Counts = tuple[int, int, int]


def kept_of_row(bias: list[float], seen: list[int], counts: Counts) -> list[int]:
    """Return the keys that one query keeps among its visible ones, in key order."""
    window, last, first = counts
    by_place = set(seen[:first]) | set(seen[max(0, len(seen) - last) :])
    usable = [j for j in seen if not math.isnan(bias[j]) and bias[j] != -math.inf]
    others = sorted((j for j in usable if j not in by_place), key=lambda j: (-bias[j], j))
    return [*others[:window], *(j for j in usable if j in by_place)]


def kept_row_by_row(
    bias: Tensor, mask: Tensor | None, counts: Counts, *, causal: bool, queries: int
) -> Tensor:
    """Return bool (h, Q, K) of bias (h, 1|Q, K) and mask (h, 1|Q, K)."""
    heads, _, keys = bias.shape
    keep = torch.zeros(heads, queries, keys, dtype=torch.bool)
    rows = bias.double().expand(heads, queries, keys).tolist()
    seen_rows = None if mask is None else mask.expand(heads, queries, keys).tolist()
    for head in range(heads):
        for i in range(queries):
            past = min(keys, max(0, i + keys - queries + 1)) if causal else keys
            seen = [j for j in range(past) if seen_rows is None or seen_rows[head][i][j]]
            keep[head, i, kept_of_row(rows[head][i], seen, counts)] = True
    return keep


COUNTS = st.tuples(
    st.sampled_from([0, 1, 2, 5, 12, 60]),
    st.sampled_from([0, 1, 2, 3, 7, 60]),
    st.sampled_from([0, 0, 1, 2, 5, 60]),
)


def draw_bias(draw: Any, generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    if draw(st.booleans()):
        bias = torch.randint(-2, 3, shape, generator=generator).float()  # many ties
    else:
        bias = torch.randn(shape, generator=generator)
    for special in draw(st.sets(st.sampled_from([torch.nan, torch.inf, -torch.inf, -0.0]))):
        bias.masked_fill_(torch.rand(shape, generator=generator) < 0.2, special)
    return bias


@given(data=st.data())
def test_keeps_what_the_loop_keeps(data: st.DataObject, target: Target) -> None:
    draw = data.draw
    source = Source(draw(st.integers(0, 2**31 - 1)))
    causal = draw(st.sampled_from([True, True, True, False]))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    heads, keys = kv_heads * group, draw(st.integers(0, 40))
    queries = draw(st.integers(0, 50)) if causal else 1
    head_sizes = st.sampled_from([1, kv_heads, heads])
    rows = st.sampled_from([1, 1, queries])
    bias = draw_bias(draw, source.generator, (1, draw(head_sizes), draw(rows), keys))
    bias = strided(source, bias.to(draw(st.sampled_from(target.dtypes))))
    mask = None
    if draw(st.booleans()):
        shape = (1, draw(head_sizes), draw(rows), draw(st.sampled_from([1, keys, keys])))
        mask = torch.rand(shape, generator=source.generator) < draw(st.sampled_from([0.3, 0.8]))
    counts = draw(COUNTS)
    selected = dynamic_mask(
        bias.to(target.device),
        counts[0],
        causal,
        None if mask is None else mask.to(target.device),
        keep_last=counts[1],
        keep_first=counts[2],
        query_length=queries,
        key_length=keys,
        num_heads=heads,
        num_kv_heads=kv_heads,
        backend=target.backend,
    )
    expected = kept_row_by_row(
        per_query_head(bias, heads, kv_heads)[0].expand(heads, -1, -1),
        None if mask is None else per_query_head(mask, heads, kv_heads)[0].expand(heads, -1, -1),
        counts,
        causal=causal,
        queries=queries,
    )
    per_key = bias.shape[2] == 1 and (mask is None or mask.shape[2] == 1)
    assert isinstance(selected, IntervalMask) == (causal and per_key)
    if isinstance(selected, IntervalMask):
        assert selected.max_kept == max(1, sum(counts))
        dropped = selected.start >= selected.end
        assert not selected.start[dropped].any()
        assert not selected.end[dropped].any()
        selected = selected.to_bool(queries)
    selected = per_query_head(selected.cpu(), heads, kv_heads)[0]
    assert torch.equal(selected.expand(heads, queries, keys), expected)


# Above some thousand keys, GPUs select in chunks of keys.
@pytest.mark.parametrize("padding", ["none", "left", "gaps"])
@pytest.mark.parametrize(
    ("queries", "keys", "counts"),
    [
        (300, 300, (20, 7, 3)),
        (100, 1500, (64, 90, 0)),
        (60, 4500, (40, 33, 5)),
        (5000, 5000, (0, 900, 4)),
        (40, 9000, (300, 0, 700)),
    ],
)
def test_long_rows(queries: int, keys: int, counts: Counts, padding: str, target: Target) -> None:
    """Check some rows; adjacent rows must differ by the arriving and the leaving keys."""
    bias = randn(1, 2, 1, keys, seed=keys).to(target.dtypes[0])
    bias[0, 1] = bias[0, 1].round()  # ties
    bias[0, 0, 0, 5::17] = torch.nan
    mask = None
    if padding == "left":
        mask = (torch.arange(keys) >= keys // 3).expand(1, 1, 1, keys)
    elif padding == "gaps":
        mask = (randn(1, 1, 1, keys, seed=2) > -0.5) & (torch.arange(keys) // 700 % 2 == 0)
    selected = dynamic_mask(
        bias.to(target.device),
        counts[0],
        True,
        None if mask is None else mask.to(target.device),
        keep_last=counts[1],
        keep_first=counts[2],
        query_length=queries,
        backend=target.backend,
    )
    start, end = selected.start[0].cpu(), selected.end[0].cpu()
    for i in {0, 1, 2, queries // 3, queries // 2, queries - 2, queries - 1}:
        past = i + keys - queries + 1
        seen = [j for j in range(past) if mask is None or mask[0, 0, 0, j]]
        for head in range(2):
            want = kept_of_row(bias[0, head, 0].tolist(), seen, counts)
            kept = (start[head] <= i) & (i < end[head])
            assert kept.nonzero().flatten().tolist() == sorted(want)


@given(data=st.data())
def test_packed_sequences(data: st.DataObject, target: Target) -> None:
    draw = data.draw
    source = Source(draw(st.integers(0, 2**31 - 1)))
    lengths = [
        (draw(st.integers(0, 30)), draw(st.integers(0, 30))) for _ in range(draw(st.integers(1, 4)))
    ]
    total = sum(keys for _, keys in lengths)
    dtype = target.dtypes[0]
    bias = draw_bias(draw, source.generator, (2, 1, total)).to(dtype)
    mask = None
    if draw(st.booleans()):
        mask = torch.rand((1, 1, total), generator=source.generator) < 0.6
    counts = draw(COUNTS)
    selected = dynamic_mask(
        bias.to(target.device),
        counts[0],
        True,
        None if mask is None else mask.to(target.device),
        keep_last=counts[1],
        keep_first=counts[2],
        cu_seqlens_q=bounds([queries for queries, _ in lengths]).to(target.device),
        cu_seqlens_k=bounds([keys for _, keys in lengths]).to(target.device),
        max_seqlen_q=max(queries for queries, _ in lengths),
        max_seqlen_k=max(keys for _, keys in lengths),
        num_heads=2,
        backend=target.backend,
    )
    begin = 0
    for queries, length in lengths:
        own = slice(begin, begin + length)
        begin += length
        part = IntervalMask(selected.start[None, :, own], selected.end[None, :, own])
        expected = kept_row_by_row(
            bias[:, :, own],
            None if mask is None else mask[:, :, own].expand(2, -1, -1),
            counts,
            causal=True,
            queries=queries,
        )
        assert torch.equal(part.to_bool(queries)[0].cpu(), expected)


@pytest.mark.parametrize("counts", [(6, 4, 2), (0, 5, 0), (0, 0, 3), (9, 0, 1), (3, 10**9, 0)])
@pytest.mark.parametrize("form", ["keys", "padded", "rows", "float32"])
def test_the_attention_call(counts: Counts, form: str, target: Target) -> None:
    """The call equals a selection composed with the mask, followed by attention."""
    dtype = target.dtypes[0]
    problem = simple_problem(dtype, causal=True)
    bias = randn(2, 2, 17 if form == "rows" else 1, 23, seed=5)
    problem.bias = bias if form == "float32" else bias.to(dtype)
    seen = None
    if form == "padded":
        seen = torch.arange(23) >= torch.tensor([[4], [0]])
        problem.mask = seen
    dout = randn(*problem.query.shape, dtype=dtype)
    window, last, first = counts
    options = {"window_size": window, "keep_last": last, "keep_first": first}
    got = problem.results(target, dout=dout, **options)
    problem.mask = torch.stack(
        [
            kept_row_by_row(
                problem.bias[b],
                None if seen is None else seen[b].expand(2, 1, 23),
                counts,
                causal=True,
                queries=17,
            )
            for b in range(2)
        ]
    )
    for name, value in problem.results(target, dout=dout).items():
        torch.testing.assert_close(got[name], value, atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("packed", [False, True])
def test_a_window_without_a_bias(packed: bool, target: Target) -> None:
    problem = simple_problem(target.dtypes[0], causal=True)
    tensors = [t.to(target.device) for t in (problem.query, problem.key, problem.value)]
    near = IntervalMask.sliding_window(4, 0, 17, 23, device=target.device)
    first = torch.arange(23, device=target.device) < 2
    near.end = torch.where(first, 17, near.end)
    near.start = torch.where(first, 0, near.start)
    options = {"is_causal": True, "backend": target.backend}
    want = flash_dmattn_func(*tensors, near, **options)
    options |= {"window_size": 0, "keep_last": 5, "keep_first": 2}
    if packed:
        cu = (bounds([length] * 2).to(target.device) for length in (17, 23))
        flat = (t.flatten(0, 1) for t in tensors)
        got = flash_dmattn_varlen_func(*flat, *cu, 17, 23, **options).view_as(want)
    else:
        got = flash_dmattn_func(*tensors, **options)
    assert torch.equal(got, want)


@pytest.mark.parametrize("keys", [1, 3, 5, 6, 9])
def test_one_query_needs_no_causality(keys: int, target: Target) -> None:
    problem = simple_problem(target.dtypes[0], queries=1, keys=keys)
    tensors = [t.to(target.device) for t in (problem.query, problem.key, problem.value)]
    bias = randn(2, 2, 1, keys).to(target.device, target.dtypes[0])
    options = {"window_size": 3, "keep_last": 2, "keep_first": 1, "backend": target.backend}
    got = flash_dmattn_func(*tensors, attn_bias=bias, **options)
    assert torch.equal(flash_dmattn_func(*tensors, attn_bias=bias, is_causal=True, **options), got)
    kept = torch.stack(
        [kept_row_by_row(bias[b].cpu(), None, (3, 2, 1), causal=False, queries=1) for b in range(2)]
    )
    want = flash_dmattn_func(*tensors, kept.to(target.device), bias, backend=target.backend)
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"keep_last": -1}, ValueError, "keep_last must be at least 0, got -1"),
    ({"keep_first": -2}, ValueError, "keep_first must be at least 0, got -2"),
    ({"keep_last": True}, TypeError, "keep_last must be an integer, got True"),
    ({"keep_first": 1.0}, TypeError, r"keep_first must be an integer, got 1\.0"),
    ({"keep_last": None}, TypeError, "keep_last must be an integer, got None"),
    (
        {"keep_last": 2, "is_causal": False},
        ValueError,
        "keep_last must be 0 with is_causal=False and 17 queries.*got 2",
    ),
    (
        {"keep_first": 3, "is_causal": False},
        ValueError,
        "keep_first must be 0 with is_causal=False and 17 queries.*got 3",
    ),
    (
        {"keep_last": 2, "window_size": None},
        ValueError,
        "keep_last must be 0 without window_size, got 2; window_size=0 keeps the nearest keys",
    ),
    ({"keep_first": 1, "window_size": None}, ValueError, "keep_first must be 0 without window_"),
    ({"keep_last": -1, "window_size": None}, ValueError, "keep_last must be at least 0, got -1"),
    ({"window_size": 2, "attn_bias": None, "keep_last": 1}, ValueError, "attn_bias is None"),
    (
        {"window_size": 0, "attn_bias": None},
        ValueError,
        "window_size is 0, .*attn_bias is None; .* must be None, or 0 with keep_last or keep_first",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG)
@pytest.mark.parametrize("packed", [False, True])
def test_wrong_arguments(
    packed: bool, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    problem = simple_problem(torch.float32)
    tensors = (problem.query, problem.key, problem.value)
    bias = randn(2, 1, 1, 23)
    options = {"attn_bias": bias, "is_causal": True, "window_size": 3, **changes}
    if not packed:
        with pytest.raises(error, match=message):
            flash_dmattn_func(*tensors, **options)
        return
    if options["attn_bias"] is not None:
        options["attn_bias"] = bias.view(1, 1, -1)
    cu = (bounds([length] * 2) for length in (17, 23))
    with pytest.raises(error, match=message):
        flash_dmattn_varlen_func(*(t.flatten(0, 1) for t in tensors), *cu, 17, 23, **options)


def test_a_mask_of_rows_alike_has_none() -> None:
    with pytest.raises(ValueError, match="keep_last must be 0 with is_causal=False and 5 queries"):
        dynamic_mask(torch.zeros(1, 5), 2, keep_last=1)
    with pytest.raises(ValueError, match="keep_first must be at least 0, got -1"):
        dynamic_mask(torch.zeros(1, 5), 2, True, keep_first=-1)


@pytest.mark.parametrize("name", ["keep_last", "keep_first"])
def test_a_plan_has_its_own(name: str) -> None:
    problem = simple_problem(torch.float32, causal=True)
    tensors = (problem.query, problem.key, problem.value)
    plan = make_plan(*tensors[:2], dynamic_mask(randn(2, 1, 1, 23), 3, True, query_length=17), True)
    with pytest.raises(ValueError, match="window_size must be None with a plan"):
        flash_dmattn_func(*tensors, plan=plan, window_size=3, **{name: 1})
    with pytest.raises(ValueError, match=f"{name} must be 0 without window_size, got 1"):
        flash_dmattn_func(*tensors, plan=plan, **{name: 1})
