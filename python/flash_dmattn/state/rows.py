# SPDX-License-Identifier: BSD-3-Clause
"""Rows of keys, values, biases and positions, and the choice among them. All is differentiable.

A row belongs to each KV head by itself: what lies in row i of one head need not be the token
that lies in row i of another. Only a bias that all heads share has rows that they share.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import writable
from ..record import DENSE, KeyCounts
from ..selection import CallShape, select

# The position of a row that holds nothing: behind all others.
NOWHERE = 2**62


class Rows(NamedTuple):
    """Some tokens' keys and values.

    Where a head of the bias does not keep a row that is held, its bias there is -inf.
    """

    key: Tensor  # (B, rows, Hk, D)
    value: Tensor  # (B, rows, Hk, D)
    bias: Tensor  # (B, h, 1, rows), h of 1, Hk or H
    position: Tensor  # int64 (B, p, rows), p of 1 (where h is 1) or Hk

    @property
    def size(self) -> int:
        """How many rows there are."""
        return self.key.shape[1]

    @property
    def sharing(self) -> int:
        """Heads of the bias that keep rows of one KV head."""
        return self.bias.shape[1] // self.position.shape[1]

    def take(self, index: Tensor) -> Rows:
        """Return the rows that int64 ``(B, p, n)`` names."""
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
    """Return rows that hold nothing, for tokens like these, in memory of their own."""
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
    """Return some sequences of a batch; inference mode must be off here."""
    return tensor.index_select(0, writable(sequences.to(tensor.device)))


def concatenated(*parts: Rows) -> Rows:
    """Put rows one after another."""
    if len(parts) == 1:
        return parts[0]
    key, value, bias, position = zip(*parts, strict=True)
    return Rows(torch.cat(key, 1), torch.cat(value, 1), torch.cat(bias, 3), torch.cat(position, 2))


def narrowed(rows: Rows, start: int, end: int) -> Rows:
    """Return some of the rows, as views."""
    return Rows(
        rows.key[:, start:end],
        rows.value[:, start:end],
        rows.bias[..., start:end],
        rows.position[..., start:end],
    )


def in_order(rows: Rows) -> Rows:
    """Sort by position, so that the lower index is the earlier token; empty rows go to the end."""
    return rows.take(rows.position.argsort(-1))


def slots(like: Rows, counts: KeyCounts) -> int:
    """Return for how many rows `kept_rows` has room."""
    return counts.keep_first + counts.window * like.sharing + counts.keep_last


def kept_rows(rows: Rows, counts: KeyCounts, backend: str) -> Rows:
    """Return what later queries can see of tokens: the first, the best of the others, and the last.

    Args:
        rows: in order of their positions. Where each head's bias is -inf there is no token.
        counts: of the rows that a query keeps.
        backend: that selects.
    """
    if rows.size == 0:
        return empty_rows(rows, slots(rows, counts))
    capacity = counts.window * rows.sharing
    if not counts.by_place:
        return best(rows, counts.window, capacity, backend)
    is_first, is_last = by_place(rows.by_set(rows.bias != -torch.inf).any(2), counts)
    parts = []
    if counts.keep_first:
        parts.append(_unmarked(_compacted(rows, is_first, counts.keep_first)))
    if counts.window:
        has_place = rows.for_bias(is_first | is_last)
        others = rows._replace(bias=rows.bias.masked_fill(has_place, -torch.inf))
        parts.append(best(others, counts.window, capacity, backend))
    if counts.keep_last:
        parts.append(_unmarked(_compacted(rows, is_last, counts.keep_last)))
    return concatenated(*parts)


def marked(rows: Rows) -> Rows:
    """Return the rows of `kept_rows` with a bias of NaN for each token that no head keeps, which
    tells it from a place without a token.
    """
    if rows.sharing > 1:
        return rows  # a head may keep what another drops, so all tokens have their own biases
    is_dropped = (rows.bias == -torch.inf) & (rows.position != NOWHERE).unsqueeze(2)
    return rows._replace(bias=rows.bias.masked_fill(is_dropped, torch.nan))


def _unmarked(rows: Rows) -> Rows:
    """Do what `marked` undoes, for attention that takes all rows without a selection."""
    if rows.sharing > 1:
        return rows
    return rows._replace(bias=rows.bias.masked_fill(rows.bias.isnan(), -torch.inf))


def by_place(is_token: Tensor, counts: KeyCounts) -> tuple[Tensor, Tensor]:
    """Return which of the columns that are tokens, bool ``(..., columns)``, are the first ones, and
    which of the others are the last.
    """
    number = is_token.cumsum(-1)
    is_first = is_token & (number <= counts.keep_first)
    return is_first, is_token & ~is_first & (number > number[..., -1:] - counts.keep_last)


def best(rows: Rows, window: int, capacity: int, backend: str) -> Rows:
    """Return what the heads keep: the rows with the ``window`` largest biases of each.

    Args:
        rows: in order of their positions.
        window: rows that a head of the bias keeps.
        capacity: rows to return, at least as many as are kept; the rest are empty.
        backend: that selects.
    """
    batch, heads, _, count = rows.bias.shape
    kv_heads = rows.key.shape[2]
    shape = CallShape(batch, max(heads, kv_heads), kv_heads, 1, count)
    by = selecting(rows, backend)
    keep = select(rows.bias, None, DENSE, shape, KeyCounts(window), False, by).mask
    assert keep is not None
    keep = keep.expand_as(rows.bias)  # where the bias is expanded, the selection is one for all
    rows = rows._replace(bias=rows.bias.masked_fill(~keep, -torch.inf))
    return _compacted(rows, rows.by_set(keep).any(2), capacity)


def _compacted(rows: Rows, wanted: Tensor, capacity: int) -> Rows:
    """Return at most so many rows, those that bool ``(B, p, rows)`` wants, and empty ones."""
    running = wanted.cumsum(-1)
    number = torch.arange(1, capacity + 1, device=running.device).expand(*running.shape[:2], -1)
    index = torch.searchsorted(running, number.contiguous())
    is_there = index < rows.size
    taken = rows.take(index.clamp(max=rows.size - 1))
    return taken._replace(
        bias=taken.bias.masked_fill(~taken.for_bias(is_there), -torch.inf),
        position=taken.position.masked_fill(~is_there, NOWHERE),
    )


def selecting(rows: Rows, backend: str) -> str:
    """Return the backend that ranks biases: kernels do not rank those of float64."""
    return "reference" if rows.bias.dtype == torch.float64 else backend
