# SPDX-License-Identifier: BSD-3-Clause
"""Selection against torch.topk row by row, ties included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import flash_dmattn
from drawn.buffers import poisoned_buffers
from drawn.source import Source, strided
from flash_dmattn import (
    IntervalMask,
    dynamic_mask,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
)
from flash_dmattn.reference import per_query_head
from support import Target, rand_bool, randn, simple_problem


def topk_row_by_row(
    bias: Tensor, mask: Tensor | None, window: int, causal: bool, queries: int, heads: int
) -> Tensor:
    """Select by torch.topk over (bias descending, index ascending), one row at a time."""
    batch, keys = bias.shape[0], bias.shape[3]
    if mask is not None:
        batch = max(batch, mask.shape[0])
        mask = per_query_head(mask, heads, mask.shape[1]).expand(batch, heads, queries, keys)
    bias = per_query_head(bias, heads, bias.shape[1]).expand(batch, heads, queries, keys)
    keep = torch.zeros(batch, heads, queries, keys, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                row = bias[b, h, i].double()
                seen = ~row.isnan() & (row != -torch.inf)
                if causal:
                    seen &= torch.arange(keys) <= i + keys - queries
                if mask is not None:
                    seen &= mask[b, h, i]
                # The order of topk: first the rank among the distinct values, then the index.
                candidates = seen.nonzero().flatten()
                _, place = torch.unique(row[candidates], return_inverse=True)
                order = place * keys + (keys - 1 - candidates)
                top = torch.topk(order, min(window, len(candidates))).indices
                keep[b, h, i, candidates[top]] = True
    return keep


@given(data=st.data())
def test_selects_what_topk_selects(data: st.DataObject, target: Target) -> None:
    draw = data.draw
    source = Source(draw(st.integers(0, 2**31 - 1)))
    generator = source.generator
    batch, kv_heads, group = (draw(st.integers(1, 2)) for _ in range(3))
    heads, queries, keys = kv_heads * group, draw(st.integers(0, 20)), draw(st.integers(0, 40))
    shape = (
        draw(st.sampled_from([1, batch])),
        draw(st.sampled_from([1, kv_heads, heads])),
        draw(st.sampled_from([1, 1, queries])),
        draw(st.sampled_from([1, keys, keys, keys])),
    )
    if draw(st.booleans()):
        bias = torch.randint(-2, 3, shape, generator=generator).float()  # many ties
    else:
        bias = torch.randn(shape, generator=generator)
    for special in draw(st.sets(st.sampled_from([torch.nan, torch.inf, -torch.inf, -0.0]))):
        bias.masked_fill_(torch.rand(shape, generator=generator) < 0.2, special)
    bias = strided(source, bias.to(draw(st.sampled_from(target.dtypes))))
    mask = None
    if draw(st.booleans()):
        mask_shape = (
            draw(st.sampled_from([1, batch])),
            draw(st.sampled_from([1, kv_heads, heads])),
            draw(st.sampled_from([1, 1, queries])),
            draw(st.sampled_from([1, keys, keys])),
        )
        mask = torch.rand(mask_shape, generator=generator) < 0.7
    window, causal = draw(st.integers(0, 45)), draw(st.booleans())
    selected = dynamic_mask(
        bias.to(target.device),
        window,
        causal,
        None if mask is None else mask.to(target.device),
        query_length=queries,
        key_length=keys,
        num_heads=heads,
        num_kv_heads=kv_heads,
        backend=target.backend,
    )
    expected = topk_row_by_row(
        bias.expand(*bias.shape[:3], keys), mask, window, causal, queries, heads
    )
    per_key = bias.shape[2] == 1 and (mask is None or mask.shape[2] == 1)
    assert isinstance(selected, IntervalMask) == (causal and per_key)
    if isinstance(selected, IntervalMask):
        unselected = selected.start >= selected.end
        assert not selected.start[unselected].any()
        assert not selected.end[unselected].any()
        selected = selected.to_bool(queries)
    selected = per_query_head(selected.cpu(), heads, selected.shape[1])
    assert torch.equal(
        selected.expand(batch, heads, queries, keys), expected.expand(batch, heads, queries, keys)
    )


@pytest.mark.parametrize("keys, window", [(1000, 100), (777, 64), (300, 299), (2000, 1)])
def test_long_causal_selection(keys: int, window: int, target: Target) -> None:
    bias = randn(1, 2, 1, keys, seed=keys).to(target.dtypes[0])
    selected = dynamic_mask(bias.to(target.device), window, True, backend=target.backend)
    assert torch.equal(
        selected.to_bool(keys).cpu(), topk_row_by_row(bias, None, window, True, keys, 2)
    )


def test_few_rows_of_many_keys(pack_target: Target) -> None:
    """Keys that never enter the window get the interval [0, 0), whatever the memory holds."""
    queries, keys = 40, 4600
    bias = randn(1, 2, 1, keys, seed=6).to(pack_target.dtypes[0])
    with poisoned_buffers():
        selected = dynamic_mask(bias.to(pack_target.device), 90, True, query_length=queries)
    assert isinstance(selected, IntervalMask)
    unselected = selected.start >= selected.end
    assert not selected.start[unselected].any()
    assert not selected.end[unselected].any()
    want = topk_row_by_row(bias, None, 90, True, queries, 2)
    assert torch.equal(selected.to_bool(queries).cpu(), want)


def test_exactly_window_keys_are_kept_despite_ties(target: Target) -> None:
    bias = torch.zeros(1, 1, 1, 50, device=target.device, dtype=target.dtypes[0])
    selected = dynamic_mask(bias, 7, True, backend=target.backend)
    counts = selected.to_bool(50).sum(-1)[0, 0].cpu()
    assert torch.equal(counts, torch.arange(1, 51).clamp(max=7))
    assert selected.to_bool(50)[0, 0, -1, :7].all()


def test_ties_below_larger_values(target: Target) -> None:
    bias = torch.randint(0, 3, (1, 1, 1, 1500), generator=torch.Generator().manual_seed(3))
    bias = bias.to(target.dtypes[0])
    selected = dynamic_mask(bias.to(target.device), 700, backend=target.backend)
    assert torch.equal(selected.cpu(), topk_row_by_row(bias, None, 700, False, 1, 1))


@pytest.mark.parametrize("shape", [(2, 30), (2, 4, 30), (2, 4, 1, 30)])
def test_shapes_of_a_bias_per_key(shape: tuple[int, ...], target: Target) -> None:
    bias = randn(*shape).to(target.device, target.dtypes[0])
    heads = 1 if len(shape) == 2 else shape[1]
    keep = dynamic_mask(bias, 5, backend=target.backend)
    assert keep.shape == (2, heads, 1, 30)
    assert keep.dtype == torch.bool
    assert (keep.sum(-1) == 5).all()
    selected = dynamic_mask(bias, 5, True, backend=target.backend)
    assert selected.start.shape == (2, heads, 30)
    assert selected.start.dtype == torch.int32


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 4, 17, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_one_bias_for_all_keys_is_that_many_equal_ones(
    shape: tuple[int, ...], causal: bool, target: Target
) -> None:
    dtype = target.dtypes[0]
    problem = simple_problem(dtype, causal=causal)
    problem.bias = randn(*shape, dtype=dtype)
    dout = randn(*problem.query.shape, dtype=dtype)
    got = problem.results(target, dout=dout, window_size=6)
    kept = torch.arange(23).expand(17, 23) < 6
    if causal:
        kept = kept & torch.ones(17, 23, dtype=torch.bool).tril(23 - 17)
    problem.mask = kept[None, None]
    for name, value in problem.results(target, dout=dout).items():
        torch.testing.assert_close(got[name], value, atol=1e-4, rtol=1e-3, msg=name)
    bias = problem.bias.to(target.device)
    options = {"is_causal": causal, "query_length": 17, "backend": target.backend}
    by_length = dynamic_mask(bias, 6, key_length=23, **options)
    seen = torch.ones(2, 23, dtype=torch.bool, device=target.device)
    by_mask = dynamic_mask(bias, 6, attention_mask=seen, **options)
    for mask in (by_length, by_mask):
        rows = mask.to_bool(17) if isinstance(mask, IntervalMask) else mask
        assert torch.equal(rows.cpu() & kept, kept.expand(*rows.shape[:2], 17, 23))
        assert (rows.sum(-1) <= 6).all()


def test_one_bias_for_all_keys_with_a_mask(target: Target) -> None:
    """The first visible keys are kept; a mask broadcasts over the keys."""
    bias = torch.zeros(1, 1, 1, 1, device=target.device, dtype=target.dtypes[0])
    seen = torch.tensor([[False, True, False, True, True]], device=target.device)
    keep = dynamic_mask(bias, 2, attention_mask=seen, backend=target.backend)
    assert keep.flatten().tolist() == [False, True, False, True, False]
    rows = torch.tensor([True, False], device=target.device)[None, None, :, None]
    keep = dynamic_mask(bias, 2, attention_mask=rows, key_length=3, backend=target.backend)
    assert keep[0, 0].tolist() == [[True, True, False], [False, False, False]]


@pytest.mark.parametrize("shape", [(2, 1), (2, 2, 1)])
@pytest.mark.parametrize("name", ["attn_bias", "attention_mask"])
def test_only_four_dimensions_broadcast_keys(name: str, shape: tuple[int, ...]) -> None:
    given = {"attn_bias": torch.zeros(2, 2, 1, 23), "attention_mask": torch.ones(2, 23) > 0}
    given[name] = torch.ones(shape, dtype=given[name].dtype)
    with pytest.raises(ValueError, match=rf"{name} with . dimensions .* only with four dimensions"):
        dynamic_mask(**given, window_size=3, key_length=23)


@pytest.mark.parametrize("mask_shape", [None, (2, 1), (2, 1, 1, 1)])
def test_the_number_of_keys_must_be_known(mask_shape: tuple[int, ...] | None) -> None:
    mask = None if mask_shape is None else torch.ones(mask_shape, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"key_length must be given .*got \(2, 4, 1, 1\)"):
        dynamic_mask(torch.ones(2, 4, 1, 1), 3, True, mask)


def test_no_gradient_flows_through_the_choice(target: Target) -> None:
    bias = randn(1, 1, 1, 9).to(target.device).requires_grad_()
    selected = dynamic_mask(bias, 3, True, backend=target.backend)
    assert not selected.start.requires_grad
    assert not dynamic_mask(bias, 3, backend=target.backend).requires_grad


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask_kind", ["none", "keys", "2-D", "rows"])
@pytest.mark.parametrize("bias_rows", [1, 17])
def test_window_size_of_the_attention_call(
    causal: bool, mask_kind: str, bias_rows: int, target: Target
) -> None:
    """The call equals a selection composed with the mask, followed by attention."""
    dtype = target.dtypes[0]
    problem = simple_problem(dtype, causal=causal)
    bias = randn(2, 2, bias_rows, 23, seed=5).to(dtype)
    mask = {
        "none": None,
        "keys": rand_bool(2, 4, 1, 23),
        "2-D": rand_bool(2, 23),
        "rows": rand_bool(2, 1, 17, 23),
    }[mask_kind]
    problem.bias, problem.mask = bias, mask
    dout = randn(*problem.query.shape, dtype=dtype)
    got = problem.results(target, dout=dout, window_size=6)
    seen = mask[:, None, None, :] if mask_kind == "2-D" else mask
    problem.mask = topk_row_by_row(bias, seen, 6, causal, 17, 4)
    for name, value in problem.results(target, dout=dout).items():
        torch.testing.assert_close(got[name], value, atol=1e-4, rtol=1e-3, msg=name)


def test_window_larger_than_the_keys_keeps_all(target: Target) -> None:
    problem = simple_problem(target.dtypes[0], causal=True)
    problem.bias = randn(2, 1, 1, 23).to(target.dtypes[0])
    dout = randn(*problem.query.shape)
    wide = problem.results(target, dout=dout, window_size=10**9)
    for name, value in problem.results(target, dout=dout).items():
        torch.testing.assert_close(wide[name], value, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("form", ["dense", "packed", "rows"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_window_of_all_keys_but_one_drops_one(causal: bool, form: str, target: Target) -> None:
    """The last query sees all keys and drops only the worst one."""
    keys, rows = 23, 17
    problem = simple_problem(target.dtypes[0], causal=causal, keys=keys)
    bias = randn(2, 1, rows if form == "rows" else 1, keys).to(target.dtypes[0])
    kept = topk_row_by_row(bias, None, keys - 1, causal, rows, 4)
    assert (kept[:, :, -1].sum(-1) == keys - 1).all()
    query, key, value, bias, kept = (
        t.to(target.device) for t in (problem.query, problem.key, problem.value, bias, kept)
    )
    want = flash_dmattn_func(query, key, value, kept, bias, backend=target.backend)
    options = {"is_causal": causal, "window_size": keys - 1, "backend": target.backend}
    if form == "packed":
        bounds = (
            torch.tensor([0, length, 2 * length], dtype=torch.int32, device=target.device)
            for length in (rows, keys)
        )
        tensors = (t.flatten(0, 1) for t in (query, key, value))
        bias = bias.transpose(0, 1).flatten(1).unsqueeze(1)
        got = flash_dmattn_varlen_func(*tensors, *bounds, rows, keys, attn_bias=bias, **options)
        got = got.view_as(query)
    else:
        got = flash_dmattn_func(query, key, value, attn_bias=bias, **options)
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)


def test_a_compiled_window_of_all_keys_but_one_drops_one() -> None:
    query, key, bias = randn(1, 5, 2, 8), randn(1, 9, 2, 8), randn(1, 2, 1, 9)

    def call(query: Tensor, key: Tensor, bias: Tensor) -> Tensor:
        out = flash_dmattn_func(query, key, key, attn_bias=bias, window_size=8)
        assert isinstance(out, Tensor)
        return out

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(query, key, bias), call(query, key, bias))


def test_window_of_nothing_keeps_nothing(target: Target) -> None:
    problem = simple_problem(target.dtypes[0])
    tensors = [t.to(target.device) for t in (problem.query, problem.key, problem.value)]
    bias = randn(2, 1, 1, 23).to(target.device, target.dtypes[0])
    out = flash_dmattn_func(*tensors, attn_bias=bias, window_size=0, backend=target.backend)
    assert not out.any()


def test_float64_bias_needs_the_reference() -> None:
    bias = torch.randn(1, 1, 1, 5, dtype=torch.float64)
    with pytest.raises(TypeError, match=r'attn_bias has dtype torch.float64.*backend="reference"'):
        dynamic_mask(bias, 2)
    assert dynamic_mask(bias, 2, backend="reference").sum() == 2


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (([1.0], 2), TypeError, r"attn_bias must be a torch.Tensor, got list"),
        ((torch.ones(1, 1, 1, 5), -1), ValueError, r"window_size must be at least 0, got -1"),
        ((torch.ones(1, 1, 1, 5), 2.5), TypeError, r"window_size must be an integer, got 2.5"),
        ((torch.ones(5), 2), ValueError, r"attn_bias must have shape .*got \(5,\)"),
        (
            (torch.ones(1, 1, 1, 5), 2, False, torch.ones(1, 1, 1, 5)),
            TypeError,
            r"attention_mask must have dtype torch.bool .*got torch.float32",
        ),
        (
            (torch.ones(2, 5), 2, False, torch.ones(3, 5, dtype=torch.bool)),
            ValueError,
            r"attention_mask with 2 dimensions must have shape .*= \(2, 5\), got \(3, 5\)",
        ),
    ],
)
def test_wrong_arguments(
    arguments: tuple[object, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        dynamic_mask(*arguments)


@pytest.mark.parametrize("name", ["query_length", "key_length", "max_seqlen_q", "max_seqlen_k"])
def test_lengths_of_the_other_form_are_refused(name: str) -> None:
    bounds = torch.tensor([0, 2, 5], dtype=torch.int32)
    packed = {} if "max" in name else {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    relation = "with" if packed else "without"
    with pytest.raises(ValueError, match=f"^{name} must be None {relation} the cu_seqlens, got 5"):
        dynamic_mask(torch.ones(1, 1, 5), 2, True, **packed, **{name: 5})


def test_packed_selection_needs_both_cu_seqlens() -> None:
    with pytest.raises(ValueError, match="cu_seqlens_k must be given too"):
        flash_dmattn.dynamic_mask(
            torch.ones(1, 1, 5), 2, cu_seqlens_q=torch.tensor([0, 5], dtype=torch.int32)
        )
