# SPDX-License-Identifier: BSD-3-Clause
"""Causal selection as intervals, in plain PyTorch: O(K log K) time, and O(K) memory.

In each list, the ranked keys are numbered from best to worst. The query at the place of key p ranks
the keys up to p. Key j leaves the window at the first place whose threshold is below j's number.
The threshold is the window-th smallest number up to that place. Later places rank more keys, so
thresholds only fall.

A wavelet matrix of the numbers finds the thresholds of all places together, bit by bit from the
highest. The numbers up to a place are a run [low, high) in the order of the matrix. Those of the
run whose bit is 0 are counted. If the count reaches the window, the threshold is among them.

After it has left the window, a key stays for ``keep_last`` more keys that the mask keeps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_dmattn.backends.base import interval_shape
from flash_dmattn.backends.shapes import check_selection
from flash_dmattn.record import SelectionInputs
from flash_dmattn.reference import per_query_head


def select_intervals(inputs: SelectionInputs) -> tuple[Tensor, Tensor]:
    """Return start and end of the kept keys; ties go to the lower index."""
    check_selection(inputs, read_lengths=inputs.bias.device.type == "cpu")
    shape = interval_shape(inputs)
    bias, seen = _broadcast(inputs, shape)
    keys = shape[-1]
    # On a GPU a packed batch may have keys but no sequences.
    if 0 in (keys, inputs.batch):
        nothing = torch.zeros(shape, dtype=torch.int32, device=bias.device)
        return nothing, nothing.clone()
    key = torch.arange(keys, device=bias.device)
    first_key, past_key, first_row, row_count = _sequences_of_keys(inputs, key)
    # The number of visible keys before each key, in the list and in its sequence.
    before = torch.nn.functional.pad(seen.cumsum(-1), (1, 0))
    rank = before[:, :-1] - before[:, first_key]
    may_be_kept = seen & ~bias.isnan() & (bias != -torch.inf)
    is_first = may_be_kept & (rank < inputs.keep_first)
    ranked = may_be_kept & ~is_first
    # Keys that are not ranked sort last, so they displace no other key.
    order = torch.where(ranked, bias, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    number = torch.empty_like(order)
    number.scatter_(-1, order, key.expand_as(order))
    left_at = key.expand_as(number)  # the place where the key leaves the window or fails to enter
    if inputs.window > 0:
        threshold = _thresholds(number, first_key, key + 1, inputs.window)
        # Ascending over all sequences, so one search serves all keys.
        ascending = first_key * (keys + 1) + (keys - threshold)
        wanted = first_key * (keys + 1) + (keys - number)
        left_at = torch.searchsorted(ascending, wanted, right=True).maximum(key)
    # The place at which keep_last + 1 more keys have been seen.
    seen_then = before.gather(-1, left_at) + inputs.keep_last + 1
    left_at = torch.searchsorted(before[:, 1:].contiguous(), seen_then)
    end = torch.where(left_at < past_key, first_row + (left_at - key), row_count)
    end = torch.minimum(end, row_count)
    end = torch.where(is_first, row_count, end)
    start = first_row.clamp(min=0)
    kept = may_be_kept & (start < end)
    start = torch.where(kept, start, 0).to(torch.int32)
    return start.view(shape), torch.where(kept, end, 0).to(torch.int32).view(shape)


def _thresholds(number: Tensor, low: Tensor, high: Tensor, window: int) -> Tensor:
    """Return the window-th smallest number in each place's run; K if the run is shorter."""
    lists, keys = number.shape
    low, high = (bound.expand(lists, -1) for bound in (low, high))
    remaining = torch.full_like(low, window)
    is_full = high - low >= window
    threshold = torch.zeros_like(low)
    for bit in range(max(keys - 1, 1).bit_length() - 1, -1, -1):
        is_zero = (number >> bit) & 1 == 0
        zeros = torch.nn.functional.pad(is_zero.cumsum(-1), (1, 0))
        zeros_low, zeros_high = zeros.gather(-1, low), zeros.gather(-1, high)
        found = zeros_high - zeros_low
        is_in_zeros = remaining <= found
        ones = zeros[:, -1:]  # numbers whose bit is 1 follow those whose bit is 0
        low = torch.where(is_in_zeros, zeros_low, ones + low - zeros_low)
        high = torch.where(is_in_zeros, zeros_high, ones + high - zeros_high)
        remaining = torch.where(is_in_zeros, remaining, remaining - found)
        threshold = torch.where(is_in_zeros, threshold, threshold | 1 << bit)
        place = zeros[:, :-1]
        position = torch.arange(keys, device=number.device)
        moved = torch.where(is_zero, place, ones + position - place)
        number = torch.empty_like(number).scatter_(-1, moved, number)
    return torch.where(is_full, threshold, keys)


def _broadcast(inputs: SelectionInputs, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the bias and the visible keys, both ``(lists, K)``."""
    heads = shape[-2]

    def lists(tensor: Tensor) -> Tensor:
        with_batch = tensor if tensor.dim() == 4 else tensor.unsqueeze(0)
        by_head = per_query_head(with_batch, heads, with_batch.shape[1]).squeeze(2)
        return by_head.expand(shape if len(shape) == 3 else (1, *shape)).flatten(0, 1)

    bias = lists(inputs.bias)
    if inputs.mask is None:
        return bias, torch.ones_like(bias, dtype=torch.bool)
    return bias, lists(inputs.mask)


def _sequences_of_keys(
    inputs: SelectionInputs, key: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return, for each key: the first key and the end of its sequence, the sequence's row at the
    key's place, which may be negative, and the sequence's number of rows.
    """
    cu_q, cu_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    if cu_q is None or cu_k is None:
        cu_q, cu_k = (torch.arange(2, device=key.device) * n for n in (inputs.queries, inputs.keys))
    # Invalid bounds must not give indices out of range.
    cu_q, cu_k = cu_q.long(), cu_k.long().clamp(0, key.shape[-1])
    sequence = (torch.searchsorted(cu_k, key, right=True) - 1).clamp(0, max(cu_q.shape[0] - 2, 0))
    first_key, past_key, rows = cu_k[sequence], cu_k[sequence + 1], cu_q.diff()[sequence]
    return first_key, past_key, key - past_key + rows, rows
