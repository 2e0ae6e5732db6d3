# SPDX-License-Identifier: BSD-3-Clause
"""Memory layout of plans.

For each list (a batch and a head of the mask) and each tile of LIST_ROWS rows of each sequence, a
plan has the keys that any row of the tile keeps. Keys that all rows keep come first. The others
follow backwards from the end of the tile's room. A plan also has

* for intervals, or a mask that is the same for every query: the keys that any query keeps, in key
  order, and for each key the rows that keep it, including the causal limit;
* for a mask with rows: one word of bits for each key and each WORD_ROWS rows.

Without a mask there is no plan. Sizes may be symbolic.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_dmattn.record import AttentionInputs

# Copies of constants of kernels/common.py, whose import requires triton.
RANGE, INTERVALS, ROWS = 0, 1, 2
LIST_ROWS = 128
WORD_ROWS = 64
_ALIGNMENT = 16  # bytes; Triton compiles a separate kernel for pointers with this alignment


class Layout(NamedTuple):
    """The sizes of a plan."""

    kind: int
    lists: int
    list_batches: int
    list_heads: int
    list_keys: int  # keys of a list: K, for varlen total_k
    sequences: int  # sequences of a list
    tiles: int  # tiles of a list, over all its sequences
    tile_keys: int  # capacity of a tile: K, for varlen max_seqlen_k

    @property
    def plan_bytes(self) -> int:
        """The size of a plan in bytes."""
        return sum(_room(dtype, count) for _, dtype, count in _parts(self))


class PlanViews(NamedTuple):
    """The parts of a plan; None for parts that its kind lacks."""

    words: Tensor | None  # int64 [list][tile][part of the tile][key]
    kept_count: Tensor | None  # int32 [list][sequence]
    kept: Tensor | None  # int32 [list][key]: each sequence's begin at its first key
    first: Tensor | None  # int32 [list][key]: the first row that keeps the key
    past: Tensor | None  # int32 [list][key]
    counts: Tensor | None  # int32 [list][tile][all, full]
    columns: Tensor | None  # int32 [list][tile][key]


def plan_layout(inputs: AttentionInputs) -> Layout:
    """Return the sizes of a call's plan."""
    if not inputs.packed:
        sequences, rows = 1, inputs.query.shape[1]
        list_keys = tile_keys = inputs.key.shape[1]
    else:
        sequences, rows = inputs.sequences, inputs.query.shape[0]
        list_keys, tile_keys = inputs.key.shape[0], inputs.max_seqlen_k
    tiles = rows // LIST_ROWS + sequences
    if inputs.start is not None:
        kind, front = INTERVALS, tuple(inputs.start.shape[:-1])
        keys = inputs.start.shape[-1]
    elif inputs.mask is not None:
        kind = ROWS if inputs.mask.shape[-2] > 1 else INTERVALS
        front, keys = tuple(inputs.mask.shape[:-2]), inputs.mask.shape[-1]
    else:
        return Layout(RANGE, 0, 1, 1, list_keys, sequences, tiles, tile_keys)
    if inputs.block_table is not None and kind == INTERVALS:
        list_keys = keys  # the pages do not show how many of their rows are keys
    batches, heads = front if len(front) == 2 else (1, front[0])
    return Layout(kind, batches * heads, batches, heads, list_keys, sequences, tiles, tile_keys)


def plan_views(layout: Layout, plan: Tensor) -> PlanViews:
    """Return the parts of a plan."""
    at = 0
    views: dict[str, Tensor | None] = dict.fromkeys(PlanViews._fields)
    for name, dtype, count in _parts(layout):
        views[name] = plan[at : at + dtype.itemsize * count].view(dtype)
        at += _room(dtype, count)
    return PlanViews(**views)


def _parts(layout: Layout) -> list[tuple[str, torch.dtype, int]]:
    """Return the name, the dtype and the number of elements of each part of a plan."""
    if layout.kind == RANGE:
        return []
    tiles, keys = layout.lists * layout.tiles, layout.lists * layout.list_keys
    listed = [
        ("counts", torch.int32, 2 * tiles),
        ("columns", torch.int32, tiles * layout.tile_keys),
    ]
    if layout.kind == ROWS:
        words = tiles * (LIST_ROWS // WORD_ROWS) * layout.tile_keys
        return [("words", torch.int64, words), *listed]
    kept = [(name, torch.int32, keys) for name in ("kept", "first", "past")]
    return [("kept_count", torch.int32, layout.lists * layout.sequences), *kept, *listed]


def _room(dtype: torch.dtype, count: int) -> int:
    """Return the bytes of a part, padded so that the next part keeps the alignment."""
    return (dtype.itemsize * count + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
