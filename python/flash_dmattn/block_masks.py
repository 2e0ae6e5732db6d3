# SPDX-License-Identifier: BSD-3-Clause
"""BlockMasks of FlexAttention, converted to the mask forms of this package."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import check_tensors, refuse_ranks
from .checks import is_one_of
from .dispatch_state import PLAIN_TYPES, has_values
from .masks import IntervalMask
from .record import MaskBlocks

__all__ = ["mask_of_blocks", "plain_mask"]

# Mask elements that are materialized at a time.
_ELEMENTS_AT_ONCE = 1 << 24


def mask_of_blocks(
    block_mask: Any,
    query: Tensor,
    key: Tensor,
    *,
    as_tensor: bool = False,
    as_blocks: bool = False,
) -> Tensor | IntervalMask | MaskBlocks:
    """Return an `IntervalMask` if one run of queries keeps each key, else a boolean mask.

    The mask_mod is called only for the elements of partial blocks, once each. Compiled code does
    not know the partial blocks: it calls the mask_mod for all pairs and returns a boolean mask.

    Args:
        block_mask: a BlockMask of the sizes of query and key, or with 1 in place of B or H.
        query, key: ``(B, rows, heads, D)``.
        as_tensor: return no `IntervalMask`.
        as_blocks: return `MaskBlocks` in place of a boolean mask, except in compiled code.

    Raises:
        ValueError: sizes or devices differ.
    """
    _check(block_mask, query, key)
    blocks = _Blocks.of(block_mask, query.shape[1], key.shape[1])
    is_readable = type(blocks.partial) in PLAIN_TYPES and has_values(blocks.partial)
    if torch.compiler.is_compiling() or not is_readable:
        return _mask_of_all_pairs(block_mask, blocks)
    partial_blocks = blocks.partial.nonzero(as_tuple=True)
    contents = _contents_of_partial_blocks(block_mask, blocks, partial_blocks)
    if not as_tensor and blocks.queries and blocks.keys:
        found = _intervals(blocks, partial_blocks, contents)
        if found is not None:
            return found
    mask = blocks.mask(partial_blocks, contents)
    return mask if as_blocks else mask.to_bool()


def plain_mask(mask: Any, query: Tensor, key: Tensor, plan: Any = None, **options: bool) -> Any:
    """Return `mask_of_blocks` of a BlockMask; None if the call has a plan made from that mask."""
    if plan is None:
        check_tensors(query, key=key)
        return mask_of_blocks(mask, query, key, **options)
    plan_mask = getattr(plan, "block_mask", None)
    if plan_mask is mask:
        return None
    made_from = "another mask" if plan_mask is None else "another BlockMask"
    raise ValueError(
        f"attn_mask must be None or the very mask that plan was made from, {made_from}, got a "
        f"BlockMask of shape {tuple(mask.shape)}"
    )


class _Blocks(NamedTuple):
    """The partial and the full blocks, each bool ``(B|1, H|1, block rows, block columns)``."""

    partial: Tensor
    full: Tensor
    size: tuple[int, int]
    queries: int
    keys: int

    @classmethod
    def of(cls, mask: Any, queries: int, keys: int) -> _Blocks:
        size = int(mask.BLOCK_SIZE[0]), int(mask.BLOCK_SIZE[1])
        columns = -(-keys // size[1])
        partial = _dense(mask.kv_num_blocks, mask.kv_indices, columns)
        if mask.full_kv_num_blocks is None:
            return cls(partial, torch.zeros_like(partial), size, queries, keys)
        full = _dense(mask.full_kv_num_blocks, mask.full_kv_indices, columns)
        return cls(partial & ~full, full, size, queries, keys)

    def mask(self, partial_blocks: tuple[Tensor, ...], contents: Tensor) -> MaskBlocks:
        """Return the whole mask.

        Args:
            partial_blocks: the indices of the partial blocks.
            contents: the mask inside of them.
        """
        partial = contents.shape[0]
        numbers = self.full.int() - 1
        numbers[partial_blocks] = torch.arange(
            1, partial + 1, dtype=torch.int32, device=numbers.device
        )
        kept = int(self.full.sum()) + partial
        return MaskBlocks(numbers, contents, self.queries, self.keys, kept, partial)


def _dense(counts: Tensor, numbers: Tensor, columns: int) -> Tensor:
    """Turn lists of blocks into booleans ``(B, H, rows, columns)``."""
    place = torch.arange(numbers.shape[-1], device=numbers.device)
    listed = (place < counts.unsqueeze(-1)) & (numbers >= 0) & (numbers < columns)
    # The extra column receives the entries that are not listed.
    kept = torch.zeros((*numbers.shape[:-1], columns + 1), dtype=torch.bool, device=numbers.device)
    return kept.scatter(-1, numbers.long().where(listed, columns), True)[..., :columns]


def _check(mask: Any, query: Tensor, key: Tensor) -> None:
    if query.dim() != 4 or key.dim() != 4:
        refuse_ranks(query=query, key=key)
    (batch, queries, heads, _), keys = query.shape, key.shape[1]
    shape = tuple(mask.shape)
    fits = (
        len(shape) == 4
        and is_one_of(shape[0], 1, batch)
        and is_one_of(shape[1], 1, heads)
        and -(-queries // mask.BLOCK_SIZE[0]) == mask.kv_num_blocks.shape[-1]
        and getattr(mask, "seq_lengths", (queries, keys)) == (queries, keys)
    )
    if not fits:
        raise ValueError(
            f"attn_mask is a BlockMask of shape {shape}, but must have shape ({{B|1}}, {{H|1}}, Q, "
            f"K) = ({{{batch}|1}}, {{{heads}|1}}, {queries}, {keys})"
        )
    device = mask.kv_num_blocks.device
    if device != query.device:
        raise ValueError(
            f"attn_mask must be on query's device {query.device}, got a BlockMask on {device}"
        )


def _mask_of_all_pairs(mask: Any, blocks: _Blocks) -> Tensor:
    """Return the mask by a call of the mask_mod for every pair of query and key."""
    from torch.nn.attention.flex_attention import create_mask

    batch, heads = blocks.partial.shape[:2]
    sizes = batch, heads, blocks.queries, blocks.keys
    kept: Tensor = create_mask(mask.mask_mod, *sizes, device=blocks.partial.device)
    full, partial = (
        t.repeat_interleave(blocks.size[0], 2).repeat_interleave(blocks.size[1], 3)[
            :, :, : blocks.queries, : blocks.keys
        ]
        for t in (blocks.full, blocks.partial)
    )
    return full | (partial & kept)


def _contents_of_partial_blocks(
    mask: Any, blocks: _Blocks, partial_blocks: tuple[Tensor, ...]
) -> Tensor:
    """Return bool ``(n, rows, columns)``: the partial blocks' contents, False beyond Q or K."""
    device, (rows, columns) = blocks.partial.device, blocks.size
    row, column = (torch.arange(n, device=device) for n in blocks.size)
    function = mask.mask_mod
    for in_dims in ((None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)):
        function = torch.vmap(function, in_dims=in_dims)
    contents = torch.empty(
        (partial_blocks[0].shape[0], rows, columns), dtype=torch.bool, device=device
    )
    step = max(1, _ELEMENTS_AT_ONCE // (rows * columns))
    for begin in range(0, contents.shape[0], step):
        chunk = tuple(place[begin : begin + step] for place in partial_blocks)
        queries = chunk[2].unsqueeze(1) * rows + row
        keys = chunk[3].unsqueeze(1) * columns + column
        inside = (queries < blocks.queries).unsqueeze(2) & (keys < blocks.keys).unsqueeze(1)
        # Tensors that the mask_mod indexes have no elements beyond Q and K.
        limits = max(blocks.queries - 1, 0), max(blocks.keys - 1, 0)
        with _indexing():
            kept = function(*chunk[:2], queries.clamp(max=limits[0]), keys.clamp(max=limits[1]))
        contents[begin : begin + step] = kept & inside
    return contents


def _indexing() -> contextlib.AbstractContextManager[Any]:
    """Let a mask_mod index tensors by the batched numbers that torch.vmap passes."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    mode: contextlib.AbstractContextManager[Any] = TransformGetItemToIndex()
    return mode


def _intervals(
    blocks: _Blocks, partial_blocks: tuple[Tensor, ...], contents: Tensor
) -> IntervalMask | None:
    """Return the mask as intervals, or None if some key is kept by separate runs of queries.

    Work and memory are those of the blocks and of the contents of partial blocks.
    """
    batch, heads, rows, columns = blocks.full.shape
    block_rows, block_keys = blocks.size
    begins = torch.arange(rows, device=contents.device, dtype=torch.int32)[:, None] * block_rows
    ends = (begins + block_rows).clamp(max=blocks.queries)
    full, no_row = blocks.full, blocks.queries
    # Of each key: the first query that keeps it, one past the last, and how many do.
    first = begins.where(full, no_row).amin(2)
    past = ends.where(full, 0).amax(2)
    total = ((ends - begins) * full).sum(2, dtype=torch.int32)
    first, past, total = (
        t.unsqueeze(-1).repeat(1, 1, 1, block_keys).flatten(0, 2) for t in (first, past, total)
    )
    if contents.shape[0]:
        count = contents.sum(1, dtype=torch.int32)
        flags, row = contents.byte(), begins[partial_blocks[2]]
        block_first = (flags.argmax(1).int() + row).where(count > 0, no_row)
        block_past = (row + block_rows - flags.flip(1).argmax(1).int()).where(count > 0, 0)
        place = (partial_blocks[0] * heads + partial_blocks[1]) * columns + partial_blocks[3]
        place = place.unsqueeze(1).expand_as(count)
        first = first.scatter_reduce(0, place, block_first, "amin")
        past = past.scatter_reduce(0, place, block_past, "amax")
        total = total.scatter_add(0, place, count)
    if not ((past - first == total) | (total == 0)).all():
        return None
    start, end = (
        t.view(batch, heads, columns * block_keys)[..., : blocks.keys].contiguous()
        for t in (first.masked_fill(total == 0, 0), past)
    )
    return IntervalMask(start, end, query_length=blocks.queries)
