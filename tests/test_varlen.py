# SPDX-License-Identifier: BSD-3-Clause
"""Packed sequences against a dense call for each sequence, and paged keys."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import flash_dmattn
from flash_dmattn import IntervalMask, dynamic_mask, flash_dmattn_func, flash_dmattn_varlen_func
from support import (
    Problem,
    Target,
    assert_accurate,
    cotangent,
    eager_attention,
    moved,
    rand_bool,
    randn,
)

LENGTHS = [0, 5, 1, 40, 0, 70, 3]
KEY_LENGTHS = [3, 5, 0, 70, 0, 33, 130]


@dataclasses.dataclass
class Packed:
    """A packed batch: the tensors of a problem, and the lengths of its sequences."""

    q_lengths: list[int]
    k_lengths: list[int]
    problem: Problem  # packed tensors, without a batch dimension

    @classmethod
    def random(
        cls,
        dtype: torch.dtype,
        q_lengths: list[int] = LENGTHS,
        k_lengths: list[int] = KEY_LENGTHS,
        *,
        head_dim: int = 16,
        **settings: object,
    ) -> Packed:
        shapes = (sum(q_lengths), 4), (sum(k_lengths), 2), (sum(k_lengths), 2)
        tensors = (randn(*s, head_dim, dtype=dtype, seed=n) for n, s in enumerate(shapes))
        return cls(q_lengths, k_lengths, Problem(*tensors, **settings))

    def sequences(self) -> list[tuple[slice, slice, Problem]]:
        """Return each sequence as a dense problem."""
        parts, row, key = [], 0, 0
        for q_length, k_length in zip(self.q_lengths, self.k_lengths, strict=True):
            rows, keys = slice(row, row + q_length), slice(key, key + k_length)
            p = self.problem
            parts.append(
                (
                    rows,
                    keys,
                    dataclasses.replace(
                        p,
                        query=p.query[rows][None],
                        key=p.key[keys][None],
                        value=p.value[keys][None],
                        mask=cut(p.mask, rows, keys),
                        bias=cut(p.bias, rows, keys),
                    ),
                )
            )
            row, key = rows.stop, keys.stop
        return parts

    def bounds(self) -> tuple[Tensor, Tensor]:
        return bounds(self.q_lengths), bounds(self.k_lengths)


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def cut(tensor: object, rows: slice, keys: slice) -> object:
    if tensor is None:
        return None
    if isinstance(tensor, IntervalMask):
        return IntervalMask(tensor.start[None, :, keys], tensor.end[None, :, keys])
    if tensor.shape[1] == 1:
        return tensor[None, :, :, keys]
    return tensor[None, :, rows, : keys.stop - keys.start]


def run(packed: Packed, target: Target, leaves: dict[str, Tensor], **options: object):
    problem = packed.problem
    return flash_dmattn_varlen_func(
        leaves["query"],
        leaves["key"],
        leaves["value"],
        *(b.to(target.device) for b in packed.bounds()),
        max(packed.q_lengths, default=0),
        max(packed.k_lengths, default=0),
        problem.scale,
        problem.causal,
        problem.softcap,
        attn_mask=None if problem.mask is None else problem.mask.to(target.device),
        attn_bias=leaves.get("bias"),
        backend=target.backend,
        **options,
    )


def results(
    packed: Packed, leaves: dict[str, Tensor], out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor
) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(
        (out, lse), list(leaves.values()), (dout.to(out), dlse.to(lse)), allow_unused=True
    )
    named = {
        f"d{name}": torch.zeros_like(leaf) if g is None else g
        for (name, leaf), g in zip(leaves.items(), gradients, strict=True)
    }
    return {n: t.detach().cpu() for n, t in {"out": out, "lse": lse, **named}.items()}


def by_sequence(packed: Packed, leaves: dict[str, Tensor], attend) -> tuple[Tensor, Tensor]:
    """Compute each sequence by a dense function on views of the packed leaves."""
    whole = dataclasses.replace(packed.problem, **leaves)
    outs, lses = [], []
    for _, _, part in dataclasses.replace(packed, problem=whole).sequences():
        out, lse = attend(part)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def check(packed: Packed, target: Target, **options: object) -> None:
    problem = packed.problem
    dout = cotangent(randn(*problem.query.shape, seed=91)).to(problem.query.dtype)
    dlse = randn(4, problem.query.shape[0], seed=92)

    leaves = problem.leaves(target.device, None)
    got = results(
        packed, leaves, *run(packed, target, leaves, return_lse=True, **options), dout, dlse
    )
    exact = problem.leaves("cpu", torch.float64)
    truth = results(
        packed,
        exact,
        *by_sequence(
            packed,
            exact,
            lambda p: flash_dmattn.attention_reference(
                p.query,
                p.key,
                p.value,
                p.mask,
                p.bias,
                scale=p.scale,
                causal=p.causal,
                softcap=p.softcap,
            ),
        ),
        dout,
        dlse,
    )
    plain = problem.leaves("cpu", None)

    def eager(p: Problem) -> tuple[Tensor, Tensor]:
        named = {"query": p.query, "key": p.key, "value": p.value, "bias": p.bias}
        return eager_attention(p, {n: t for n, t in named.items() if t is not None})

    approximate = results(packed, plain, *by_sequence(packed, plain, eager), dout, dlse)
    assert_accurate(got, truth, approximate)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask_kind", ["none", "keys", "rows", "intervals"])
@pytest.mark.parametrize("bias_kind", ["none", "keys", "rows"])
def test_packed_sequences(causal: bool, mask_kind: str, bias_kind: str, target: Target) -> None:
    for dtype in target.dtypes:
        packed = Packed.random(dtype, causal=causal)
        packed.problem.mask = make_mask(mask_kind, 4)
        packed.problem.bias = make_bias(bias_kind, 2, dtype)
        check(packed, target)


def make_mask(kind: str, heads: int) -> Tensor | IntervalMask | None:
    total_q, total_k, longest = sum(LENGTHS), sum(KEY_LENGTHS), max(KEY_LENGTHS)
    if kind == "keys":
        return rand_bool(heads, 1, total_k)
    if kind == "rows":
        return rand_bool(heads, total_q, longest)
    if kind == "intervals":
        generator = torch.Generator().manual_seed(3)
        start, end = (
            torch.randint(-2, 75, (heads, total_k), generator=generator, dtype=torch.int32)
            for _ in range(2)
        )
        return IntervalMask(torch.minimum(start, end), torch.maximum(start, end))
    return None


def make_bias(kind: str, heads: int, dtype: torch.dtype) -> Tensor | None:
    if kind == "keys":
        return randn(heads, 1, sum(KEY_LENGTHS), dtype=dtype, seed=12)
    if kind == "rows":
        return randn(heads, sum(LENGTHS), max(KEY_LENGTHS), dtype=dtype, seed=12)
    return None


@given(data=st.data())
def test_any_lengths(data: st.DataObject, target: Target) -> None:
    draw = data.draw
    count = draw(st.integers(0, 4))
    q_lengths, k_lengths = (
        draw(st.lists(st.integers(0, 70), min_size=count, max_size=count)) for _ in range(2)
    )
    packed = Packed.random(
        draw(st.sampled_from(target.dtypes)),
        q_lengths,
        k_lengths,
        head_dim=draw(st.sampled_from([1, 16, 40, 64])),
        causal=draw(st.booleans()),
        softcap=draw(st.sampled_from([0.0, 5.0])),
    )
    if draw(st.booleans()):
        packed.problem.bias = randn(draw(st.sampled_from([1, 2, 4])), 1, sum(k_lengths), seed=4)
    if draw(st.booleans()):
        packed.problem.mask = rand_bool(draw(st.sampled_from([1, 2, 4])), 1, sum(k_lengths))
    if count:
        check(packed, target)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias_kind", ["keys", "rows"])
@pytest.mark.parametrize("mask_kind", ["none", "keys", "rows"])
def test_selection_is_per_sequence(
    causal: bool, bias_kind: str, mask_kind: str, target: Target
) -> None:
    packed = Packed.random(target.dtypes[0], causal=causal)
    bias, mask = make_bias(bias_kind, 2, target.dtypes[0]), make_mask(mask_kind, 4)
    selected = dynamic_mask(
        bias.to(target.device),
        6,
        causal,
        None if mask is None else mask.to(target.device),
        num_heads=4,
        num_kv_heads=2,
        cu_seqlens_q=packed.bounds()[0].to(target.device),
        cu_seqlens_k=packed.bounds()[1].to(target.device),
        backend=target.backend,
    ).to("cpu")
    packed.problem.bias, packed.problem.mask = bias, mask
    whole = [
        dynamic_mask(
            part.bias,
            6,
            causal,
            part.mask,
            query_length=part.query.shape[1],
            num_heads=4,
            num_kv_heads=2,
            backend="reference",
        )
        for _, _, part in packed.sequences()
    ]
    packed.problem.mask = selected
    for want, (_, _, part) in zip(whole, packed.sequences(), strict=True):
        got = part.mask
        # For a single query, one mask row for each query equals one row for all.
        want, got = (
            m.to_bool(part.query.shape[1]) if isinstance(m, IntervalMask) else m
            for m in (want, got)
        )
        assert torch.equal(got, want)


def test_window_size_of_the_call(target: Target) -> None:
    dtype = target.dtypes[0]
    packed = Packed.random(dtype, causal=True)
    packed.problem.bias = make_bias("keys", 2, dtype)
    q_bounds, k_bounds = packed.bounds()
    leaves = packed.problem.leaves(target.device, None)
    got = run(packed, target, leaves, window_size=6)
    packed.problem.mask = dynamic_mask(
        packed.problem.bias,
        6,
        True,
        cu_seqlens_q=q_bounds,
        cu_seqlens_k=k_bounds,
        backend="reference",
    )
    torch.testing.assert_close(got, run(packed, target, leaves))
    check(packed, target)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("bias_kind", "gap", "strided"),
    [
        ("none", 0, False),
        ("none", 0, True),
        ("keys", 0, True),
        ("rows", 0, True),
        ("keys", 3, False),
    ],
)
def test_paged_keys(causal: bool, bias_kind: str, gap: int, strided: bool, target: Target) -> None:
    """A gap between pages of values makes their strides differ from those of the key pages.

    Another kernel may then run, which rounds differently.
    """
    dtype, page = target.dtypes[-1], 16
    packed = Packed.random(dtype, causal=causal)
    packed.problem.bias = make_bias(bias_kind, 2, dtype)
    packed.problem.mask = make_mask("keys", 1)
    per_sequence = [-(-length // page) for length in KEY_LENGTHS]
    numbers = torch.randperm(sum(per_sequence) + 2, generator=torch.Generator().manual_seed(0))
    # Between the elements of a strided table are invalid page numbers.
    step = 2 if strided else 1
    table = torch.full((step * (max(per_sequence) + 1), len(KEY_LENGTHS)), -1, dtype=torch.int32)
    table = table[::step].t() if strided else table.t().contiguous()
    # Unused rows hold NaN: they must not be read.
    pages = [
        torch.full((len(numbers), page + rows, 2, 16), torch.nan, dtype=dtype)[:, :page]
        for rows in (0, gap)
    ]
    used = 0
    for index, (_, _, part) in enumerate(packed.sequences()):
        for start in range(0, KEY_LENGTHS[index], page):
            number = numbers[used]
            used += 1
            table[index, start // page] = number
            for side, tensor in enumerate((part.key, part.value)):
                rows = tensor[0, start : start + page]
                pages[side][number, : len(rows)] = rows
    with torch.no_grad():
        want = run(
            packed, target, packed.problem.leaves(target.device, None), return_attn_probs=True
        )
        got = run(
            packed,
            target,
            {
                **packed.problem.leaves(target.device, None),
                "key": moved(pages[0], target.device, None),
                "value": moved(pages[1], target.device, None),
            },
            return_attn_probs=True,
            block_table=moved(table, target.device, None),
        )
    rounding = {"atol": 4e-3, "rtol": 2e-2} if gap and dtype != torch.float32 else {}
    for paged, plain in zip(got, want, strict=True):
        torch.testing.assert_close(paged, plain, **rounding)


def test_probabilities(target: Target) -> None:
    packed = Packed.random(target.dtypes[0], causal=True)
    packed.problem.bias = make_bias("keys", 2, target.dtypes[0])
    leaves = packed.problem.leaves(target.device, None)
    out, lse, probabilities = run(packed, target, leaves, return_attn_probs=True)
    assert lse.shape == (4, sum(LENGTHS))
    assert probabilities.shape == (len(LENGTHS), 4, max(LENGTHS), max(KEY_LENGTHS))
    for index, (rows, _, part) in enumerate(packed.sequences()):
        queries, keys = part.query.shape[1], part.key.shape[1]
        p = probabilities[index, :, :queries, :keys].cpu().float()
        value = part.value[0].float().repeat_interleave(2, 1)
        want = torch.einsum("hqk,khd->qhd", p, value)
        torch.testing.assert_close(out[rows].cpu().float(), want, atol=2e-2, rtol=2e-2)
        assert not probabilities[index, :, queries:].any()
        assert not probabilities[index, :, :, keys:].any()


@pytest.mark.parametrize("kind", ["keys", "rows", "intervals", "window"])
def test_compiled_probabilities(kind: str, target: Target) -> None:
    """The probabilities and gradients of a compiled program equal those of separate sequences."""
    torch._dynamo.reset()
    dtype = target.dtypes[0]
    packed = Packed.random(dtype, causal=True, softcap=3.0)
    rows, keys = sum(LENGTHS), sum(KEY_LENGTHS)
    options: dict[str, object] = {"sink": randn(4, seed=6).to(target.device)}
    bias_shape = (1, rows, max(KEY_LENGTHS)) if kind == "rows" else (2, 1, keys)
    packed.problem.bias = randn(*bias_shape, dtype=dtype, seed=5)
    if kind == "keys":
        packed.problem.mask = rand_bool(2, 1, keys)
    elif kind == "rows":
        packed.problem.mask = rand_bool(4, rows, max(KEY_LENGTHS))
    elif kind == "intervals":
        start = torch.arange(keys, dtype=torch.int32).expand(2, -1) % 17
        packed.problem.mask = IntervalMask(start, start + 30)
    else:
        options |= {"window_size": 9, "keep_last": 3}

    def call(leaves: dict[str, Tensor]) -> Tensor:
        return run(packed, target, leaves, return_attn_probs=True, **options)[2]

    def call_each(leaves: dict[str, Tensor]) -> Tensor:
        problem = dataclasses.replace(packed.problem, **leaves)
        each = []
        for _, _, part in dataclasses.replace(packed, problem=problem).sequences():
            found = flash_dmattn_func(
                part.query, part.key, part.value, part.mask, part.bias, None, True, 3.0,
                return_attn_probs=True, backend=target.backend, **options,
            )[2]  # fmt: skip
            missing = max(KEY_LENGTHS) - found.shape[3], max(LENGTHS) - found.shape[2]
            each.append(torch.nn.functional.pad(found, (0, missing[0], 0, missing[1])))
        return torch.cat(each)

    mask = packed.problem.mask
    packed.problem.mask = None if mask is None else mask.to(target.device)
    leaves = packed.problem.leaves(target.device, None)
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(leaves)
    want = call_each(leaves)
    torch.testing.assert_close(got, want)
    given = [leaf for name, leaf in leaves.items() if name != "value"]
    weights = randn(*want.shape, dtype=dtype, seed=7).to(target.device)
    gradients = (torch.autograd.grad(p, given, weights) for p in (got, want))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_compiled_probabilities_without_rows_or_keys(pack_target: Target) -> None:
    """A program for any lengths and numbers of sequences also serves lengths of 0."""
    torch._dynamo.reset()
    device, dtype = pack_target.device, pack_target.dtypes[0]
    options: dict[str, object] = {"return_attn_probs": True, "backend": pack_target.backend}

    def call(*arguments: Any) -> Any:
        return flash_dmattn_varlen_func(*arguments, **options)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in (([3, 2], [4, 3]), ([0, 0], [4, 3]), ([2, 1, 1], [0, 0, 0])):
        rows, keys = map(sum, lengths)
        shapes = (rows, 2, 8), (keys, 1, 8), (keys, 1, 8)
        leaves = [randn(*shape, dtype=dtype).to(device).requires_grad_() for shape in shapes]
        bounds = [
            torch.tensor([0, *itertools.accumulate(part)], dtype=torch.int32, device=device)
            for part in lengths
        ]
        arguments = *leaves, *bounds, max(lengths[0]), max(lengths[1])
        got, want = compiled(*arguments), call(*arguments)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other)
        gradients = (torch.autograd.grad(found[2].sum(), leaves[:2]) for found in (got, want))
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other)


def test_no_rows_where_there_might_be_some(target: Target) -> None:
    """max_seqlen_q is an upper bound: the host need not know that there are no rows."""
    for dtype in target.dtypes:
        query, key, value, bias = (
            torch.randn(shape, dtype=dtype, device=target.device).requires_grad_()
            for shape in ((0, 4, 16), (5, 2, 16), (5, 2, 16), (2, 1, 5))
        )
        cu_seqlens = (torch.tensor([0, n], dtype=torch.int32, device=target.device) for n in (0, 5))
        out = flash_dmattn_varlen_func(
            query, key, value, *cu_seqlens, 1, 5, attn_bias=bias, backend=target.backend
        )
        gradients = torch.autograd.grad(out.sum(), (query, key, value, bias))
        assert gradients[0].shape == query.shape
        assert not any(gradient.any() for gradient in gradients[1:])


@pytest.mark.parametrize("backend", ["cpu", "flex", "reference"])
@pytest.mark.parametrize("longest", [6, 8])  # there are 8 keys in all
def test_expanded_rows_are_those_of_each_sequence(backend: str, longest: int) -> None:
    if backend not in flash_dmattn.get_available_backends():
        pytest.skip("cannot run here")
    query, key, value = randn(7, 4, 8), randn(8, 2, 8), randn(8, 2, 8)
    bounds = [torch.tensor(ends, dtype=torch.int32) for ends in ((0, 4, 7), (0, 2, 8))]
    row = rand_bool(2, 1, longest).expand(2, 7, longest), randn(2, 1, longest).expand(2, 7, longest)
    calls = [
        flash_dmattn_varlen_func(
            query, key, value, *bounds, 4, longest, attn_mask=mask, attn_bias=bias, backend=name
        )
        for name, (mask, bias) in (
            (backend, row),
            ("reference", [tensor.contiguous() for tensor in row]),
        )
    ]
    torch.testing.assert_close(*calls)
