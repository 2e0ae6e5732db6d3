# SPDX-License-Identifier: BSD-3-Clause
"""Shards of several packed sequences, whose lengths differ between ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from ..checks import MAX_ROWS, index
from ..record import KeyCounts, Packing
from ..selection import CallShape, select
from ..state.rows import NOWHERE, Rows


def check_packed_shard(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None,
) -> Packing:
    """Check packed tensors as far as the exchange reads them, and return their packing.

    Raises:
        TypeError, ValueError: as `context_parallel_dmattn`.
    """
    bounds = checks.cu_seqlens("cu_seqlens", cu_seqlens)
    if bounds.numel() < 2:
        raise ValueError("cu_seqlens must have the bounds of one sequence at least")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if checks.tensor(name, tensor).dim() != 3:
            raise ValueError(
                f"{name} must have shape (total, heads, D) with cu_seqlens, got "
                f"{tuple(tensor.shape)}"
            )
    total, kv_heads, _ = key.shape
    if value.shape != key.shape:
        raise ValueError(
            f"value must have shape {tuple(key.shape)} to go with key, got {tuple(value.shape)}"
        )
    heads = {1, kv_heads, query.shape[1]}
    shape = tuple(checks.tensor("attn_bias", bias).shape)
    if len(shape) != 3 or shape[0] not in heads or shape[1:] != (1, total):
        raise ValueError(
            f"attn_bias must have shape ({{H|Hk|1}}, 1, total) with Hk={kv_heads} and "
            f"total={total}, got {shape}"
        )
    for name, tensor in (("value", value), ("attn_bias", bias), ("cu_seqlens", cu_seqlens)):
        checks.same_device(name, tensor, "key's device", key.device)
    longest = 0 if max_seqlen is None else index("max_seqlen", max_seqlen, 0, MAX_ROWS)
    if max_seqlen is None or bounds.is_cpu:
        longest_part, end = torch.stack((bounds.diff().max(), bounds[-1])).tolist()
        if end != total:
            raise ValueError(f"cu_seqlens must end with {total}, the first size of key, got {end}")
        longest = max(0, longest_part) if max_seqlen is None else longest
    return Packing(bounds, bounds, None, longest, longest)


def packed_candidates(
    key: Tensor, value: Tensor, bias: Tensor, packing: Packing, counts: KeyCounts, backend: str
) -> Rows:
    """Return the rows of each sequence that later queries can see: for each head those with the
    largest biases, plus the first and the last.

    Args:
        key, value: ``(total, Hk, D)``.
        bias: ``(h, 1, total)``.
        packing: of the sequences.
        counts: of the rows that a head keeps of a sequence.
        backend: for the selection.
    """
    bounds = packing.cu_seqlens_k
    assert bounds is not None
    if key.shape[0] == 0:
        # Add one dropped key. Gradients of received rows flow through it.
        key, value = (torch.cat([t, t.new_zeros(1, *t.shape[1:])]) for t in (key, value))
        bias = torch.cat([bias, bias.new_full((bias.shape[0], 1, 1), -torch.inf)], 2)
        bounds = torch.cat([bounds[:-1], bounds[-1:] + 1])
        packing = Packing(bounds, bounds, None, 1, 1)
    (total, kv_heads, dim), heads, batch = key.shape, bias.shape[0], packing.sequences
    sets = 1 if heads == 1 else kv_heads
    shape = CallShape(batch, max(heads, kv_heads), kv_heads, *packing[3:])
    ranking = "reference" if bias.dtype == torch.float64 else backend
    has_place = None
    if counts.keeps_first_or_last:
        token = torch.arange(total, device=key.device)
        sequence = torch.bucketize(token, bounds[1:], right=True).clamp(max=batch - 1)
        is_first = token < bounds[sequence] + counts.keep_first
        is_last = token >= bounds[sequence + 1] - counts.keep_last
        has_place = (is_first | is_last) & (bias != -torch.inf).any(0, keepdim=True)
    is_ranked = None if has_place is None else ~has_place
    keep = select(bias, is_ranked, packing, shape, KeyCounts(counts.window), False, ranking).mask
    assert keep is not None
    keep = keep if has_place is None else keep | has_place
    keep = keep.expand_as(bias)  # an expanded bias has one selection for all heads
    running = keep.reshape(sets, heads // sets, total).any(1).cumsum(-1)
    # The number of kept rows before each bound, (p, B + 1). On a GPU only attention checks the
    # bounds, so clamp them against indices out of range.
    inside = bounds.long().clamp(0, total)
    before = torch.cat([running.new_zeros(sets, 1), running], 1)[:, inside]
    capacity = counts.keep_first + counts.window * (heads // sets) + counts.keep_last
    wanted = before[:, :-1, None] + torch.arange(1, capacity + 1, device=key.device)
    is_row = (wanted <= before[:, 1:, None]).transpose(0, 1)  # (B, p, capacity)
    place = torch.searchsorted(running, wanted.flatten(1)).clamp(max=total - 1)
    place = place.view(sets, batch, capacity).transpose(0, 1)
    by_row = place.transpose(1, 2).expand(batch, capacity, kv_heads).reshape(-1, kv_heads, 1)
    by_row = by_row.expand(-1, kv_heads, dim)
    kept = bias[:, 0].masked_fill(~keep[:, 0], -torch.inf)
    by_head = place.repeat_interleave(heads // sets, 1).transpose(0, 1)  # (h, B, capacity)
    biases = kept.gather(1, by_head.reshape(heads, -1)).view(heads, batch, 1, capacity)
    is_filled = is_row.repeat_interleave(heads // sets, 1).unsqueeze(2)
    return Rows(
        key.gather(0, by_row).view(batch, capacity, kv_heads, dim),
        value.gather(0, by_row).view(batch, capacity, kv_heads, dim),
        biases.transpose(0, 1).masked_fill(~is_filled, -torch.inf),
        (place - bounds[:-1].view(-1, 1, 1)).masked_fill(~is_row, NOWHERE),
    )


def prepend_received(
    received: Rows, key: Tensor, value: Tensor, bias: Tensor, packing: Packing
) -> tuple[Tensor, Tensor, Tensor, Packing]:
    """Insert the received rows of each sequence before its tokens.

    Args:
        received: ``(B, rows, ...)``.
        key, value, bias: as in `packed_candidates`.
        packing: of the shard.

    Returns:
        key, value, bias, and their packing.
    """
    bounds = packing.cu_seqlens_k
    assert bounds is not None
    batch, rows, device = packing.sequences, received.size, key.device
    sequence = torch.arange(batch, device=device)
    token = torch.arange(key.shape[0], device=device)
    number = torch.bucketize(token, bounds[1:], right=True)
    first = bounds[:-1] + sequence * rows
    of_rows = (first.unsqueeze(1) + torch.arange(rows, device=device)).flatten()
    place = torch.cat([of_rows, token + (number + 1) * rows])
    count = batch * rows + key.shape[0]
    place = place.clamp(0, count - 1)

    def joined(one: Tensor, other: Tensor, dimension: int) -> Tensor:
        parts = torch.cat([one, other], dimension)
        shape = list(parts.shape)
        shape[dimension] = count
        return parts.new_empty(shape).index_copy(dimension, place, parts)

    of_received = received.bias.permute(1, 2, 0, 3).flatten(2)
    following = bounds + rows * torch.arange(batch + 1, device=device, dtype=bounds.dtype)
    return (
        joined(received.key.flatten(0, 1), key, 0),
        joined(received.value.flatten(0, 1), value, 0),
        joined(of_received, bias, 2),
        packing._replace(cu_seqlens_k=following, max_seqlen_k=packing.max_seqlen_k + rows),
    )
