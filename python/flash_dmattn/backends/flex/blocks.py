# SPDX-License-Identifier: BSD-3-Clause
"""The blocks of 128 rows and 128 keys that are computed, and which of them need no mask."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .problem import Problem

BLOCK = 128
_ELEMENTS_AT_ONCE = 1 << 26


class Blocks(NamedTuple):
    """The blocks that keep at least one pair.

    Rows and keys are padded to whole blocks; nothing is kept in the padding.
    """

    partial: Tensor  # bool ({B|1}, {H|1}, blocks of rows, key blocks)
    full: Tensor  # the same shape; never where partial is
    keys: Tensor  # bool ({B|1}, {H|1}, K): True if any row keeps the key


def padded(length: int) -> int:
    """Round a length up to whole blocks, which need no bounds checks."""
    return -(-length // BLOCK) * BLOCK


def make_blocks(problem: Problem) -> Blocks:
    """Return the blocks of a problem's mask. Partial blocks of intervals may keep nothing."""
    return _blocks_of_rows(problem) if problem.rows else _blocks_of_intervals(problem)


def _blocks_of_intervals(problem: Problem) -> Blocks:
    queries, keys = problem.query.shape[2], problem.key.shape[2]
    live = problem.start < problem.end
    fill = (0, padded(keys) - keys)

    def by_block(tensor: Tensor, dead: int) -> Tensor:
        filled = functional.pad(tensor.masked_fill(~live, dead), fill, value=dead)
        return torch.unflatten(filled, -1, (-1, BLOCK))

    never = padded(queries) + 1
    first = by_block(problem.start, never).amin(-1).unsqueeze(2)
    past = by_block(problem.end, 0).amax(-1).unsqueeze(2)
    last_start = by_block(problem.start, never).amax(-1).unsqueeze(2)
    first_end = by_block(problem.end, 0).amin(-1).unsqueeze(2)
    row = torch.arange(0, padded(queries), BLOCK, device=live.device).unsqueeze(1)
    full = (last_start <= row) & (first_end >= row + BLOCK)
    partial = (first < row + BLOCK) & (past > row) & ~full
    return Blocks(partial, full, live)


def _blocks_of_rows(problem: Problem) -> Blocks:
    queries, keys = problem.query.shape[2], problem.key.shape[2]
    sizes = [t.shape[:2] for t in (problem.start, *problem.rows)]
    batch = max(size[0] for size in sizes)
    heads = 1 if all(size[1] == 1 for size in sizes) else problem.heads[0]
    shape = (batch, heads, padded(queries) // BLOCK, padded(keys) // BLOCK)
    any_kept, all_kept = (
        torch.zeros(shape, dtype=torch.bool, device=problem.query.device) for _ in range(2)
    )
    by_key = torch.zeros(batch, heads, keys, dtype=torch.bool, device=problem.query.device)
    chunk_rows = max(1, _ELEMENTS_AT_ONCE // max(1, batch * heads * BLOCK * keys)) * BLOCK
    for begin in range(0, queries, chunk_rows):
        rows = slice(begin, min(begin + chunk_rows, queries))
        kept = _kept(problem, rows, (batch, heads, rows.stop - rows.start, keys))
        by_key |= kept.any(2)
        blocks = slice(begin // BLOCK, -(-rows.stop // BLOCK))
        missing_rows = blocks.stop * BLOCK - rows.stop
        tiles = functional.pad(kept, (0, padded(keys) - keys, 0, missing_rows))
        tiles = torch.unflatten(torch.unflatten(tiles, 3, (-1, BLOCK)), 2, (-1, BLOCK))
        any_kept[:, :, blocks] = tiles.any(5).any(3)
        all_kept[:, :, blocks] = tiles.all(5).all(3)
    return Blocks(any_kept & ~all_kept, all_kept, by_key)


def _kept(problem: Problem, rows: slice, shape: tuple[int, ...]) -> Tensor:
    """Return the kept pairs of some rows, over all keys; the rows may be of several sequences."""
    if problem.first_key is None:
        return problem.kept(rows, slice(0, shape[3])).expand(shape)
    kept = torch.zeros(shape, dtype=torch.bool, device=problem.query.device)
    for segment in problem.segments:
        part = slice(max(rows.start, segment.rows.start), min(rows.stop, segment.rows.stop))
        if part.start < part.stop:
            here = slice(part.start - rows.start, part.stop - rows.start)
            kept[:, :, here, segment.keys] = problem.kept(part, segment.keys)
    return kept
