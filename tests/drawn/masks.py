# SPDX-License-Identifier: BSD-3-Clause
"""Drawn masks and biases: every form, their values, and boolean bytes other than 0 and 1."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_dmattn import IntervalMask

from .sizes import Sizes
from .source import Source, bytes_of, strided

DENSITIES = {0.0: 0.2, 0.02: 0.7, 0.1: 1, 0.3: 1, 0.5: 1.5, 0.7: 1, 0.9: 1.5, 0.98: 1, 1.0: 1}


def draw_shape(source: Source, sizes: Sizes, longest: int) -> tuple[int, ...]:
    """Draw the shape of a mask or a bias: any dimension may be broadcast, 3-D and 2-D included."""
    heads = source.choice([1, sizes.kv_heads, sizes.heads])
    if sizes.packed:
        # With a single row, a row for each query is indistinguishable from one for all queries.
        if sizes.queries == 1 or source.chance(0.6):
            return (heads, 1, sizes.keys)
        return (heads, sizes.queries, longest)
    queries, keys = sizes.queries, sizes.keys
    rank = source.weighted({4: 8, 3: 1, 2: 1})
    if rank == 2:
        return (sizes.batch, keys)
    if rank == 3:
        return (sizes.batch, heads, keys)
    rows = source.choice([1, queries])
    return (source.choice([1, sizes.batch]), heads, rows, source.weighted({keys: 9, 1: 1}))


def draw_mask(source: Source, sizes: Sizes, longest: int) -> Tensor | IntervalMask | None:
    kind = source.weighted({"none": 3, "bool": 5, "intervals": 3})
    if kind == "none":
        return None
    if kind == "intervals":
        return draw_intervals(source, sizes)
    return draw_bool(source, draw_shape(source, sizes, longest))


def draw_bool(source: Source, shape: tuple[int, ...]) -> Tensor:
    kept = source.kept(shape, source.weighted(DENSITIES))
    rows = torch.arange(shape[-2] if len(shape) > 2 else 1).unsqueeze(-1)
    keys = torch.arange(shape[-1])
    pattern = source.weighted({"random": 6, "blocks": 1, "band": 1, "padding": 2})
    if pattern == "blocks" and len(shape) > 2:
        size = source.choice([1, 16, 50, 64, 128])
        kept = (rows // size == keys // size).expand(shape).clone()
    elif pattern == "band" and len(shape) > 2:
        size = source.integer(1, 80)
        kept = ((rows - keys).abs() < size).expand(shape).clone()
    elif pattern == "padding":
        ends = source.integers(0, shape[-1] + 1, *shape[:-2], *([1, 1] if len(shape) > 2 else [1]))
        left = keys < ends.unsqueeze(-1) if len(shape) == 2 else keys < ends
        kept = (left if source.chance(0.7) else ~left)[: shape[0]].expand(shape).clone()
    if source.chance(0.3):
        kept &= ~source.kept(shape[-1:], 0.3)
    if source.chance(0.2) and len(shape) > 2:
        kept &= source.kept((*shape[:-1], 1), 0.7)
    if source.chance(0.15):
        kept &= source.kept((*shape[:-2], 1, 1) if len(shape) > 2 else (shape[0], 1), 0.6)
    return kept


def with_bytes(source: Source, mask: Tensor) -> Tensor:
    """Give true elements other bytes than 1, as views of integers and NumPy do."""
    kind = source.weighted({"1": 6, "255": 1, "2": 1, "128": 1, "any": 1})
    if kind == "1":
        return mask
    values = source.integers(1, 256, *mask.shape) if kind == "any" else int(kind)
    return bytes_of(mask).mul_(torch.as_tensor(values, dtype=torch.uint8)).view(torch.bool)


def draw_intervals(source: Source, sizes: Sizes) -> IntervalMask:
    mask = _drawn_intervals(source, sizes)
    # This depends on no draw, so that seeds keep their earlier draws.
    last = min(sizes.q_lengths)
    begins_at_a_query = (mask.start < last) | (mask.start >= mask.end)
    mask._keeps_runs = sizes.keys % 3 == 0 and bool(begins_at_a_query.all())
    return mask


def _drawn_intervals(source: Source, sizes: Sizes) -> IntervalMask:
    heads = source.choice([1, sizes.kv_heads, sizes.heads])
    shape = (
        (heads, sizes.keys)
        if sizes.packed
        else (source.choice([1, sizes.batch]), heads, sizes.keys)
    )
    queries, keys = max(sizes.q_lengths), sizes.keys
    kinds = {"random": 5.0, "padding": 1.0, "long": 1.0}
    if not sizes.packed:
        kinds |= {"window": 1.0, "prefix": 0.5}
        kinds |= {"documents": 1.0} if queries == keys else {}
    kind = source.weighted(kinds)
    if kind == "window":
        sides = [source.choice([None, source.integer(0, 100)]) for _ in range(2)]
        return IntervalMask.sliding_window(*sides, queries, keys)
    if kind == "prefix":
        lengths = source.integers(0, keys + 1, sizes.batch)
        return IntervalMask.prefix_lm(lengths, queries, keys)
    if kind == "documents":
        ids = source.kept((sizes.batch, keys), source.choice([0.02, 0.1])).cumsum(-1)
        return IntervalMask.documents(ids)
    # Includes bounds before the first row and past the last.
    start = source.integers(-2, queries + 3, *shape)
    end = source.integers(-2, queries + 3, *shape)
    if kind == "padding":
        start, end = torch.zeros_like(start), end.gt(queries // 3).int() * max(queries, 1)
    elif kind == "long":
        end = start + source.integer(1, max(2, queries // 2))
    ordered = source.kept(shape, source.weighted({0.0: 0.5, 0.9: 1, 1.0: 1}))
    low, high = torch.minimum(start, end), torch.maximum(start, end)
    start, end = torch.where(ordered, low, start), torch.where(ordered, high, end)
    if source.chance(0.2):  # the limits of int32
        far = source.kept(shape, 0.1)
        start = start.masked_fill(far & source.kept(shape, 0.5), -(2**31))
        end = end.masked_fill(far, 2**31 - 1)
    if source.chance(0.3):
        dropped = source.kept(shape[-1:], 0.3)
        end = torch.where(dropped, start, end)
    return IntervalMask(strided(source, start), strided(source, end))


def draw_bias(
    source: Source, shape: tuple[int, ...], dtype: torch.dtype, *, selects: bool
) -> Tensor:
    """Draw a bias; one that selects may hold NaN and ties."""
    kind = source.weighted({"normal": 6, "wide": 1, "ties": 3 if selects else 0.5, "zero": 0.5})
    if kind == "ties":
        bias = source.integers(-2, 3, *shape).float()
        bias = torch.where(source.kept(shape, 0.5), -0.0, bias) if source.chance(0.3) else bias
    else:
        bias = source.randn(*shape) * {"normal": 1.0, "wide": 6.0, "zero": 0.0}[kind]
    bias = bias.to(source.choice([dtype, torch.float32]))
    specials = {-torch.inf: 0.3, torch.finfo(bias.dtype).min: 0.1}
    if selects:
        specials[torch.nan] = 0.3
    for value, probability in specials.items():
        if source.chance(probability):
            bias.masked_fill_(draw_places(source, shape), value)
    return bias


def draw_places(source: Source, shape: tuple[int, ...]) -> Tensor:
    """Draw single places, whole keys, keys of a head, rows, or heads."""
    ones = (1,) * len(shape)
    leading = len(shape) - 2 if len(shape) > 2 else 1
    forms = {
        "places": shape,
        "keys": (*ones[:-1], shape[-1]),
        "keys of heads": (*shape[:leading], *ones[leading:-1], shape[-1]),
        "rows": (*shape[:-1], 1),
        "heads": (*shape[:leading], *ones[leading:]),
    }
    form = source.choice(list(forms))
    return source.kept(forms[form], source.choice([0.05, 0.3, 0.6])).expand(shape)
