# SPDX-License-Identifier: BSD-3-Clause
"""Rows of keys, values, biases and positions, and their selection. All is differentiable.

Each KV head has its own rows: row i of one head and row i of another may be different tokens. Only
with a bias that all heads share do they share rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import writable
from ..record import DENSE, KeyCounts
from ..selection import CallShape, select

# The position of an empty row: after all others.
NOWHERE = 2**62


class Rows(NamedTuple):
    """Keys and values of some tokens.

    If a head of the bias does not keep a held row, its bias there is -inf.
    """

    key: Tensor  # (B, rows, Hk, D)
    value: Tensor  # (B, rows, Hk, D)
    bias: Tensor  # (B, h, 1, rows), h of 1, Hk or H
    position: Tensor  # int64 (B, p, rows), p of 1 (where h is 1) or Hk

    @property
    def size(self) -> int:
        """The number of rows."""
        return self.key.shape[1]

    @property
    def sharing(self) -> int:
        """The number of bias heads that share the rows of one KV head."""
        return self.bias.shape[1] // self.position.shape[1]

    def take(self, index: Tensor) -> Rows:
        """Return the rows at indices int64 ``(B, p, n)``."""
        batch, _, count = index.shape
        kv_heads, dim = self.key.shape[2:]
        by_row = index.transpose(1, 2).expand(batch, count, kv_heads).unsqueeze(-1)
        by_row = by_row.expand(batch, count, kv_heads, dim)
        return Rows(
            self.key.gather(1, by_row),
            self.value.gather(1, by_row),
            self.bias.gather(3, self.for_bias(index)),
            self.position.gather(2, index),
        )

    def for_bias(self, index: Tensor) -> Tensor:
        """Repeat ``(B, p, n)`` for the heads of the bias: ``(B, h, 1, n)``."""
        batch, sets, count = index.shape
        repeated = index.unsqueeze(2).expand(batch, sets, self.sharing, count)
        return repeated.reshape(batch, sets * self.sharing, 1, count)

    def by_set(self, per_bias: Tensor) -> Tensor:
        """View ``(B, h, 1, n)`` as ``(B, p, h / p, n)``."""
        batch, heads, _, count = per_bias.shape
        sets = self.position.shape[1]
        return per_bias.reshape(batch, sets, heads // sets, count)


def empty_rows(like: Rows, count: int) -> Rows:
    """Return empty rows for tokens like these, in separate memory."""
    shapes = [list(tensor.shape) for tensor in like]
    for shape, dimension in zip(shapes, (1, 1, 3, 2), strict=True):
        shape[dimension] = count
    key, value, bias, position = like
    return Rows(
        key.new_zeros(shapes[0]),
        value.new_zeros(shapes[1]),
        bias.new_full(shapes[2], -torch.inf),
        position.new_full(shapes[3], NOWHERE),
    )


def chosen(tensor: Tensor, sequences: Tensor) -> Tensor:
    """Return some sequences of a batch. Inference mode must be off here."""
    return tensor.index_select(0, writable(sequences.to(tensor.device)))


def concatenated(*parts: Rows) -> Rows:
    """Concatenate rows."""
    if len(parts) == 1:
        return parts[0]
    key, value, bias, position = zip(*parts, strict=True)
    return Rows(torch.cat(key, 1), torch.cat(value, 1), torch.cat(bias, 3), torch.cat(position, 2))


def narrowed(rows: Rows, start: int, end: int) -> Rows:
    """Return a range of the rows as views."""
    return Rows(
        rows.key[:, start:end],
        rows.value[:, start:end],
        rows.bias[..., start:end],
        rows.position[..., start:end],
    )


def in_order(rows: Rows) -> Rows:
    """Sort by position, so that lower indices are earlier tokens; empty rows go to the end."""
    return rows.take(rows.position.argsort(-1))


def slots(like: Rows, counts: KeyCounts) -> int:
    """Return the number of rows that `kept_rows` returns."""
    return counts.keep_first + counts.window * like.sharing + counts.keep_last


def kept_rows(rows: Rows, counts: KeyCounts, backend: str) -> Rows:
    """Return the rows that later queries can see: the first, the best of the others, and the last.

    Args:
        rows: in order of their positions. If the bias is -inf for every head, there is no token.
        counts: of the rows that a query keeps.
        backend: for the selection.
    """
    if rows.size == 0:
        return empty_rows(rows, slots(rows, counts))
    capacity = counts.window * rows.sharing
    if not counts.keeps_first_or_last:
        return best_rows(rows, counts.window, capacity, backend)
    is_first, is_last = first_and_last(rows.by_set(rows.bias != -torch.inf).any(2), counts)
    parts = []
    if counts.keep_first:
        parts.append(_unmark_dropped(_compact(rows, is_first, counts.keep_first)))
    if counts.window:
        has_place = rows.for_bias(is_first | is_last)
        others = rows._replace(bias=rows.bias.masked_fill(has_place, -torch.inf))
        parts.append(best_rows(others, counts.window, capacity, backend))
    if counts.keep_last:
        parts.append(_unmark_dropped(_compact(rows, is_last, counts.keep_last)))
    return concatenated(*parts)


def mark_dropped(rows: Rows) -> Rows:
    """Return the rows of `kept_rows` with a bias of NaN for each token that no head keeps, to
    distinguish it from an empty row.
    """
    if rows.sharing > 1:
        return rows  # a head may keep a row that another drops, so biases of all tokens are kept
    is_dropped = (rows.bias == -torch.inf) & (rows.position != NOWHERE).unsqueeze(2)
    return rows._replace(bias=rows.bias.masked_fill(is_dropped, torch.nan))


def _unmark_dropped(rows: Rows) -> Rows:
    """Undo `mark_dropped`, for attention to all rows without a selection."""
    if rows.sharing > 1:
        return rows
    return rows._replace(bias=rows.bias.masked_fill(rows.bias.isnan(), -torch.inf))


def first_and_last(is_token: Tensor, counts: KeyCounts) -> tuple[Tensor, Tensor]:
    """Return, for bool ``(..., columns)`` of tokens, which are the first ones, and which of the
    others are the last.
    """
    number = is_token.cumsum(-1)
    is_first = is_token & (number <= counts.keep_first)
    return is_first, is_token & ~is_first & (number > number[..., -1:] - counts.keep_last)


def best_rows(rows: Rows, window: int, capacity: int, backend: str) -> Rows:
    """Return the rows that any head keeps, each those with its ``window`` largest biases.

    Args:
        rows: in order of their positions.
        window: number of rows that a head of the bias keeps.
        capacity: number of rows to return, at least the number of kept ones; the rest are empty.
        backend: for the selection.
    """
    batch, heads, _, count = rows.bias.shape
    kv_heads = rows.key.shape[2]
    shape = CallShape(batch, max(heads, kv_heads), kv_heads, 1, count)
    ranking = ranking_backend(rows, backend)
    keep = select(rows.bias, None, DENSE, shape, KeyCounts(window), False, ranking).mask
    assert keep is not None
    keep = keep.expand_as(rows.bias)  # an expanded bias has one selection for all heads
    rows = rows._replace(bias=rows.bias.masked_fill(~keep, -torch.inf))
    return _compact(rows, rows.by_set(keep).any(2), capacity)


def _compact(rows: Rows, wanted: Tensor, capacity: int) -> Rows:
    """Return ``capacity`` rows: those that bool ``(B, p, rows)`` selects, then empty ones."""
    running = wanted.cumsum(-1)
    number = torch.arange(1, capacity + 1, device=running.device).expand(*running.shape[:2], -1)
    index = torch.searchsorted(running, number.contiguous())
    is_there = index < rows.size
    compacted = rows.take(index.clamp(max=rows.size - 1))
    return compacted._replace(
        bias=compacted.bias.masked_fill(~compacted.for_bias(is_there), -torch.inf),
        position=compacted.position.masked_fill(~is_there, NOWHERE),
    )


def ranking_backend(rows: Rows, backend: str) -> str:
    """Return the backend that ranks biases. Kernels cannot rank float64."""
    return "reference" if rows.bias.dtype == torch.float64 else backend
