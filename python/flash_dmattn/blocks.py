# SPDX-License-Identifier: BSD-3-Clause
"""Conversion of selected key blocks to lists of keys or to a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import checks, dispatch_state
from .arguments import check_packed_ranks, refuse_ranks
from .operators import define
from .record import MaskBlocks, Packing
from .selection import total_keys

__all__ = ["lists_or_mask"]

# Blocks of fewer pairs become booleans. A thread would read more than 128 of their numbers for each
# 128 queries and 32 keys, twice.
_LEAST_PAIRS = 32


def lists_or_mask(
    packing: Packing,
    query: Tensor,
    key: Tensor,
    block_indices: Tensor | None,
    block_size: tuple[int, int] | None,
    *,
    by_mask: bool,
    as_blocks: bool,
    **excluded: Any,
) -> tuple[Tensor | None, Tensor | MaskBlocks | None]:
    """Return blocks as ``key_indices`` or as ``attn_mask``; the other result is None.

    Args:
        packing, query, key: of the call.
        block_indices, block_size: as in `flash_dmattn_func`.
        by_mask: the call needs a mask, because key lists do not support it.
        as_blocks: `MaskBlocks` may take the place of a boolean mask.
        **excluded: arguments that cannot be combined with blocks; each must be None.
    """
    if block_indices is None or block_size is None:
        missing = "block_indices" if block_indices is None else "block_size"
        raise ValueError(f"{missing} must be given too: block_indices lists blocks of block_size")
    conflicting = [name for name, value in excluded.items() if value is not None]
    if conflicting:
        raise ValueError(
            f"block_indices cannot be combined with {', '.join(conflicting)}: what a query attends "
            "to is what the list of its block names; leave other blocks out of the list"
        )
    if not isinstance(block_size, (tuple, list)) or len(block_size) != 2:
        raise TypeError(
            "block_size must be (queries of a block, keys of a block), got "
            f"{checks.described(block_size)}"
        )
    rows, size = (checks.index("block_size", number, 1) for number in block_size)
    _check(packing, query, key, checks.tensor("block_indices", block_indices), rows)
    is_dense, heads = packing.is_dense, block_indices.shape[-3]
    keys = key.shape[1] if is_dense else packing.max_seqlen_k
    queries = query.shape[1] if is_dense else query.shape[0]
    if not torch.compiler.is_compiling():  # sizes may be symbolic there
        # A block beyond the sequence is the only block; clamp it, or its empty part would cost.
        rows, size = min(rows, max(queries, 1)), min(size, max(keys, 1))
    if rows == 1 and not by_mask and checks.is_one_of(heads, 1, key.shape[-2]):
        return _call_operator("block_keys", _keys, block_indices, size, keys), None
    if as_blocks and rows > 1 and rows * size >= _LEAST_PAIRS:
        return None, _mask_blocks(block_indices, rows, size, queries, keys)
    if is_dense or queries != 1:
        return None, _call_operator("block_keep", _keep, block_indices, rows, size, queries, keys)
    total = total_keys(key, packing)
    bounds = [checks.cu_seqlens(name, getattr(packing, name)) for name in Packing._fields[:2]]
    return None, _call_operator(
        "block_keep_alone", _keep_alone, block_indices, *bounds, size, keys, total
    )


def _check(packing: Packing, query: Tensor, key: Tensor, blocks: Tensor, rows: int) -> None:
    if not packing.is_dense and rows != 1:
        raise ValueError(
            "block_size must be (1, keys of a block) for packed sequences, whose blocks of queries "
            f"would not be of one sequence; got {rows} queries"
        )
    if blocks.dtype != torch.int32:
        raise TypeError(
            f"block_indices must have dtype torch.int32, got {blocks.dtype}; "
            "block_indices.to(torch.int32) is one"
        )
    checks.same_device("block_indices", blocks, "query's device", query.device)
    if not packing.is_dense:
        check_packed_ranks(query, key, paged=packing.block_table is not None)
    elif query.dim() != 4 or key.dim() != 4:
        refuse_ranks(query=query, key=key)
    batch: tuple[int, ...] = (query.shape[0],) if packing.is_dense else ()
    count = -(-query.shape[len(batch)] // rows)
    heads = query.shape[-2], key.shape[-2], 1
    shape = tuple(blocks.shape)
    if (
        len(shape) == query.dim()
        and shape[:-3] == batch
        and checks.is_one_of(shape[-3], *heads)
        and shape[-2] == count
    ):
        return
    choice = "|".join(dict.fromkeys(map(str, heads)))
    form, sizes = "{H|Hk|1}, total_q, k", f"{{{choice}}}, {count}, any k"
    if batch:
        form = "B, {H|Hk|1}, blocks of queries, k"
        sizes = f"{batch[0]}, {sizes}"
    raise ValueError(f"block_indices must have shape ({form}) = ({sizes}), got {shape}")


def _call_operator(name: str, implementation: Callable[..., Tensor], *arguments: Any) -> Tensor:
    if dispatch_state.is_transformed():
        return implementation(*arguments)
    made: Tensor = getattr(torch.ops.flash_dmattn, name).default(*arguments)
    return made


def _in_range(blocks: Tensor, size: int, keys: int) -> Tensor:
    return (blocks >= 0) & (blocks < -(-keys // size))


def _keys(blocks: Tensor, size: int, keys: int) -> Tensor:
    """List the keys of blocks. A block that is listed twice counts once."""
    blocks = blocks.masked_fill(~_in_range(blocks, size, keys), -1).sort(-1).values
    if blocks.shape[-1] > 1:
        is_repeated = blocks[..., 1:] == blocks[..., :-1]
        blocks = torch.cat([blocks[..., :1], blocks[..., 1:].masked_fill(is_repeated, -1)], -1)
    offsets = torch.arange(size, device=blocks.device, dtype=torch.int32)
    # All keys of a negative block are negative.
    return (blocks.unsqueeze(-1) * size + offsets).flatten(-2)


def _keys_fake(blocks: Tensor, size: int, keys: int) -> Tensor:
    return blocks.new_empty((*blocks.shape[:-1], blocks.shape[-1] * size))


def _keep(blocks: Tensor, rows: int, size: int, queries: int, keys: int) -> Tensor:
    """Return bool ``(..., queries, keys)``."""
    kept = _numbers(blocks, size, keys) == 0
    if rows > 1:
        kept = kept.repeat_interleave(rows, -2)[..., :queries, :]
    return kept.repeat_interleave(size, -1)[..., :keys].contiguous()


def _mask_blocks(blocks: Tensor, rows: int, size: int, queries: int, keys: int) -> MaskBlocks:
    """Return `_keep` as blocks."""
    numbers = _call_operator("block_numbers", _numbers, blocks, size, keys)
    contents = blocks.new_empty((0, rows, size), dtype=torch.bool)
    # A block may be listed twice. Only the device could tell.
    return MaskBlocks(numbers, contents, queries, keys, blocks.numel(), 0)


def _numbers(blocks: Tensor, size: int, keys: int) -> Tensor:
    """Return int32 ``(..., blocks of queries, blocks of keys)``: 0 for listed blocks, else -1."""
    columns = -(-keys // size)
    # The extra column receives indices that are out of range.
    place = blocks.where(_in_range(blocks, size, keys), columns).long()
    numbers = blocks.new_full((*blocks.shape[:-1], columns + 1), -1).scatter(-1, place, 0)
    return numbers[..., :columns].contiguous()


def _numbers_fake(blocks: Tensor, size: int, keys: int) -> Tensor:
    return blocks.new_empty((*blocks.shape[:-1], -(-keys // size)))


def _keep_fake(blocks: Tensor, rows: int, size: int, queries: int, keys: int) -> Tensor:
    return blocks.new_empty((*blocks.shape[:-2], queries, keys), dtype=torch.bool)


def _keep_alone(
    blocks: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, size: int, keys: int, total: int
) -> Tensor:
    """Return bool ``(h, 1, total)`` for a packed batch with a single query.

    Attention reads such a mask along the keys of all sequences.
    """
    kept = _keep(blocks, 1, size, 1, keys)
    own_sequence = (cu_seqlens_q[1:] == 0).sum().clamp(max=len(cu_seqlens_k) - 1).unsqueeze(0)
    place = torch.arange(total, device=kept.device) - cu_seqlens_k.index_select(0, own_sequence)
    inside = (place >= 0) & (place < keys)
    return kept.index_select(-1, place.clamp(0, max(keys - 1, 0))) & inside


def _keep_alone_fake(
    blocks: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, size: int, keys: int, total: int
) -> Tensor:
    return blocks.new_empty((*blocks.shape[:-1], total), dtype=torch.bool)


define("block_keys", ("Tensor blocks, SymInt size, SymInt keys", "Tensor"), _keys, _keys_fake)
define(
    "block_numbers",
    ("Tensor blocks, SymInt size, SymInt keys", "Tensor"),
    _numbers,
    _numbers_fake,
)
define(
    "block_keep",
    ("Tensor blocks, SymInt rows, SymInt size, SymInt queries, SymInt keys", "Tensor"),
    _keep,
    _keep_fake,
)
define(
    "block_keep_alone",
    (
        "Tensor blocks, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt size, SymInt keys, "
        "SymInt total",
        "Tensor",
    ),
    _keep_alone,
    _keep_alone_fake,
)
