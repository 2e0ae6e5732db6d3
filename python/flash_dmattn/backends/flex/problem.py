# SPDX-License-Identifier: BSD-3-Clause
"""One form for all calls: a dense batch whose mask is one interval of rows per key.

A mask with rows is added as booleans per row and key. Causality, key masks, interval masks, per-key
biases of -inf and the sequences of a packed batch are all intervals. A packed batch becomes a batch
of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flash_dmattn.record import AttentionInputs
from flash_dmattn.reference import per_query_head

# Bounds the memory of computations in row chunks.
_ELEMENTS_AT_ONCE = 1 << 24


class Segment(NamedTuple):
    """Some of the rows, and the keys that they may keep."""

    rows: slice
    keys: slice
    last_key: int | None  # last key of the first row, if causal; each next row sees one key more


class Problem(NamedTuple):
    """Attention of query ``(B, H, Q, D)`` over key and value ``(B, Hk, K, D)``."""

    query: Tensor
    key: Tensor
    value: Tensor
    start: Tensor  # int32 ({B|1}, {H|1}, K): row i keeps key j only if start_j <= i < end_j
    end: Tensor
    rows: tuple[Tensor, ...]  # bool ({B|1}, {H|Hk|1}, Q, {columns|1})
    bias: Tensor | None  # ({B|1}, {H|Hk|1}, {Q|1}, {columns|1}), as given
    # int64 (Q,): each row's key at column 0 of tensors with rows; None: key 0.
    first_key: Tensor | None
    segments: tuple[Segment, ...]

    @property
    def heads(self) -> tuple[int, int]:
        """The numbers of query heads and of KV heads."""
        return self.query.shape[1], self.key.shape[1]

    def kept(self, rows: slice, keys: slice) -> Tensor:
        """Return bool ``({B|1}, {H|1}, rows, keys)`` for rows and keys of one segment."""
        row = torch.arange(rows.start, rows.stop, device=self.start.device).unsqueeze(1)
        start, end = (t[..., keys].unsqueeze(2) for t in (self.start, self.end))
        kept = (start <= row) & (row < end)
        for tensor in self.rows:
            kept = kept & per_query_head(self.columns(tensor, rows, keys), *self.heads)
        return kept

    def columns(self, tensor: Tensor, rows: slice, keys: slice) -> Tensor:
        """Slice a bias or a mask to rows and keys; broadcast dimensions stay."""
        if tensor.shape[3] == 1:
            keys = slice(None)
        elif tensor.shape[2] == 1:
            return tensor[..., keys]
        elif self.first_key is not None:
            segment = next(s for s in self.segments if s.rows.start <= rows.start < s.rows.stop)
            first = segment.keys.start
            keys = slice(keys.start - first, keys.stop - first)
        return tensor[:, :, slice(None) if tensor.shape[2] == 1 else rows, keys]

    def parts(self) -> Iterator[tuple[slice, slice]]:
        """Yield row chunks with the keys that they may keep, a bounded number of pairs each."""
        batch, heads = self.query.shape[:2]
        for segment in self.segments:
            keys = segment.keys
            count = max(1, _ELEMENTS_AT_ONCE // max(1, batch * heads * (keys.stop - keys.start)))
            for begin in range(segment.rows.start, segment.rows.stop, count):
                rows = slice(begin, min(begin + count, segment.rows.stop))
                stop = keys.stop
                if segment.last_key is not None:
                    seen = segment.last_key + rows.stop - segment.rows.start
                    stop = max(keys.start, min(stop, seen))
                yield rows, slice(keys.start, stop)


def make_problem(inputs: AttentionInputs) -> Problem:
    """Convert a checked call to this form."""
    return _packed(inputs) if inputs.packed else _dense(inputs)


def _dense(inputs: AttentionInputs) -> Problem:
    query, key, value = (t.transpose(1, 2) for t in inputs[:3])
    (_, heads, queries, _), (_, kv_heads, keys, _) = query.shape, key.shape
    start = torch.zeros(1, 1, keys, dtype=torch.int32, device=query.device)
    end = torch.full_like(start, queries)
    if inputs.causal:
        position = torch.arange(keys, dtype=torch.int32, device=query.device)
        start = (position - (keys - queries)).clamp(0, queries).expand_as(start)
    if inputs.start is not None and inputs.end is not None:
        intervals = (per_query_head(t, heads, kv_heads) for t in (inputs.start, inputs.end))
        start, end = _intersect(start, end, *intervals)
    start, end, rows = _fold_masks(start, end, inputs.mask, inputs.bias, heads, kv_heads)
    segment = Segment(slice(0, queries), slice(0, keys), keys - queries if inputs.causal else None)
    return Problem(query, key, value, start, end, rows, inputs.bias, None, (segment,))


def _packed(inputs: AttentionInputs) -> Problem:
    assert inputs.cu_seqlens_q is not None
    assert inputs.cu_seqlens_k is not None
    device, heads, kv_heads = inputs.query.device, inputs.query.shape[1], inputs.key.shape[-2]
    q_bounds, k_bounds = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
    batch, total_q, total_k = len(q_bounds) - 1, q_bounds[-1], k_bounds[-1]
    first_row, last_row, first_key, last_key = (
        bounds.long()
        for t in (inputs.cu_seqlens_q, inputs.cu_seqlens_k)
        for bounds in (t[:-1], t[1:])
    )
    key_sequence, row_sequence = (
        torch.repeat_interleave(last - first, output_size=total)
        for first, last, total in ((first_key, last_key, total_k), (first_row, last_row, total_q))
    )
    position = torch.arange(total_k, device=device) - first_key[key_sequence]
    begin, past = first_row[key_sequence], last_row[key_sequence]
    start, end = begin[None, None], past[None, None]
    if inputs.causal:
        lengths = (last_key - first_key)[key_sequence]
        start = (past - lengths + position).maximum(begin).minimum(past)[None, None]
    if inputs.start is not None and inputs.end is not None:
        # Rows of the own sequence. Clamp before adding: bounds may be as large as int32 allows.
        count = past - begin
        intervals = (
            per_query_head((begin + t.long().clamp(min=0).minimum(count))[None], heads, kv_heads)
            for t in (inputs.start, inputs.end)
        )
        start, end = _intersect(start, end, *intervals)
    # The dense form has a batch dimension before the heads.
    bias, mask = (None if t is None else t.unsqueeze(0) for t in (inputs.bias, inputs.mask))
    start, end, rows = _fold_masks(start.int(), end.int(), mask, bias, heads, kv_heads, packed=True)
    key, value = inputs.key, inputs.value
    if inputs.block_table is not None:
        page = inputs.block_table.long()[key_sequence, position // key.shape[1]]
        key, value = (t[page, position % key.shape[1]] for t in (key, value))
    segments = tuple(
        Segment(
            slice(q_bounds[n], q_bounds[n + 1]),
            slice(k_bounds[n], k_bounds[n + 1]),
            k_bounds[n + 1] - (q_bounds[n + 1] - q_bounds[n]) if inputs.causal else None,
        )
        for n in range(batch)
    )
    query, key, value = (t.unsqueeze(0).transpose(1, 2) for t in (inputs.query, key, value))
    return Problem(query, key, value, start, end, rows, bias, first_key[row_sequence], segments)


def _intersect(start: Tensor, end: Tensor, *mask: Tensor) -> tuple[Tensor, Tensor]:
    return torch.maximum(start, mask[0]), torch.minimum(end, mask[1])


def narrowed(tensor: Tensor, *, packed: bool) -> Tensor:
    """Narrow expanded dimensions of batch, heads or rows to size 1, which does not change values.

    Rows of packed tensors stay: a single row would have the keys of all sequences.
    """
    for dimension in range(2 if packed else 3):
        if tensor.stride(dimension) == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _fold_masks(
    start: Tensor,
    end: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    heads: int,
    kv_heads: int,
    *,
    packed: bool = False,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Fold keys that are dropped for all rows into the intervals; return these and the rest."""
    rows = []
    for tensor in (mask, bias):
        if tensor is None:
            continue
        tensor = narrowed(tensor, packed=packed)
        kept = tensor if tensor.dtype == torch.bool else tensor != -torch.inf
        if kept.shape[2] != 1:
            rows.append(kept)
            continue
        end = torch.where(per_query_head(kept, heads, kv_heads).squeeze(2), end, start)
        start = start.expand_as(end)
    return start, end, tuple(rows)
