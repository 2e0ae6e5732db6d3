# SPDX-License-Identifier: BSD-3-Clause
"""Drawn masks of empty, full and partial blocks, given as FlexAttention's BlockMask."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .masks import draw_bool
from .sizes import Sizes
from .source import Source, truth_of

BlockSize = tuple[int, int]  # queries and keys


def draw_blocks(source: Source, sizes: Sizes) -> tuple[Tensor, BlockSize]:
    """Draw a boolean mask, and the size of its blocks."""
    heads, batch = source.choice([1, sizes.heads]), source.choice([1, sizes.batch])
    rows, columns = (source.choice([32, 64, 128, 256, source.integer(32, 256)]) for _ in range(2))
    mask = draw_bool(source, (batch, heads, sizes.queries, sizes.keys))
    blocks = (batch, heads, -(-sizes.queries // rows), -(-sizes.keys // columns))
    full, empty = (
        source.kept(blocks, source.choice([0.1, 0.3, 0.5]))
        .repeat_interleave(rows, 2)[:, :, : sizes.queries]
        .repeat_interleave(columns, 3)[..., : sizes.keys]
        for _ in range(2)
    )
    return (mask | full) & ~empty, (rows, columns)


def block_mask_of(mask: Tensor, size: BlockSize, heads: int) -> Any:
    """Return the BlockMask of a boolean mask ``({B|1}, {H|Hk|1}, Q, K)`` of a call with H heads."""
    from torch.nn.attention.flex_attention import create_block_mask

    kept = truth_of(mask)
    if kept.shape[1] > 1:  # a BlockMask has no form for the KV heads of a group
        kept = kept.repeat_interleave(heads // kept.shape[1], 1)

    def mask_mod(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        pair: Tensor = kept[b, h, query, key]
        return pair

    return create_block_mask(mask_mod, *kept.shape, device=str(kept.device), BLOCK_SIZE=size)
