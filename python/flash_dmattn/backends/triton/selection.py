# SPDX-License-Identifier: BSD-3-Clause
"""Causal selection as intervals, in plain PyTorch: O(K log K) time, and O(K) memory.

Number the keys of a list from the best to the worst. A row keeps key j if no fewer than ``window``
of the keys that it sees have numbers below j's: that is, if j's number is at most the threshold of
the row, the window-th smallest number that it sees. Later rows see more, so that thresholds only
fall, and a key is kept until the first row whose threshold is below its number.

The thresholds of all rows are found together, bit by bit from the highest, in a wavelet matrix of
the numbers: of those that a row sees, in the order of the matrix the run [low, high), the ones
whose bit is 0 are counted; if they reach the window, the threshold is among them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_dmattn.backends.base import SelectionInputs, interval_shape
from flash_dmattn.backends.shapes import check_selection
from flash_dmattn.reference import per_query_head


class _Rows(NamedTuple):
    """Where the rows of all sequences stand, and the keys that each sees."""

    sequence: Tensor  # of each row
    low: Tensor  # the first key that the row sees, and past the last
    high: Tensor
    key_sequence: Tensor  # of each key
    first_row: Tensor  # of each key: the first row of its own sequence that sees it
    row_begin: Tensor  # of each key: the first row of its sequence
    row_count: Tensor


def select_intervals(inputs: SelectionInputs) -> tuple[Tensor, Tensor]:
    """Return start and end of the keys with the largest bias, the lower index in ties."""
    check_selection(inputs, read_lengths=inputs.bias.device.type == "cpu")
    shape = interval_shape(inputs)
    bias, visible = _broadcast(inputs, shape)
    keys = shape[-1]
    # On a GPU a packed batch may have keys, but no sequence.
    if 0 in (inputs.window, keys, inputs.batch) or (rows := _rows(inputs, keys)).low.numel() == 0:
        nothing = torch.zeros(shape, dtype=torch.int32, device=bias.device)
        return nothing, nothing.clone()
    # Those that can never be kept come last, so that they push no other key out.
    values = torch.where(visible, bias, -torch.inf)
    order = values.sort(dim=-1, descending=True, stable=True).indices
    number = torch.empty_like(order)
    number.scatter_(-1, order, torch.arange(keys, device=order.device).expand_as(order))
    threshold = _thresholds(number, rows, inputs.window)
    # Ascending over all sequences, so that one search finds the end of every key.
    ascending = rows.sequence * (keys + 1) + (keys - threshold)
    wanted = rows.key_sequence * (keys + 1) + (keys - number)
    end = torch.searchsorted(ascending, wanted, right=True) - rows.row_begin
    end = torch.minimum(end, rows.row_count)
    kept = visible & (rows.first_row < end)
    start = torch.where(kept, rows.first_row, 0).to(torch.int32)
    return start.view(shape), torch.where(kept, end, 0).to(torch.int32).view(shape)


def _thresholds(number: Tensor, rows: _Rows, window: int) -> Tensor:
    """Return the window-th smallest number in the run of each row; where it is shorter, K."""
    lists, keys = number.shape
    low, high = (bound.expand(lists, -1) for bound in (rows.low, rows.high))
    wanted = torch.full_like(low, window)
    enough = high - low >= window
    threshold = torch.zeros_like(low)
    for bit in range(max(keys - 1, 1).bit_length() - 1, -1, -1):
        is_zero = (number >> bit) & 1 == 0
        zeros = torch.nn.functional.pad(is_zero.cumsum(-1), (1, 0))
        zeros_low, zeros_high = zeros.gather(-1, low), zeros.gather(-1, high)
        found = zeros_high - zeros_low
        among = wanted <= found
        ones = zeros[:, -1:]  # the numbers whose bit is 1 come behind those whose bit is 0
        low = torch.where(among, zeros_low, ones + low - zeros_low)
        high = torch.where(among, zeros_high, ones + high - zeros_high)
        wanted = torch.where(among, wanted, wanted - found)
        threshold = torch.where(among, threshold, threshold | 1 << bit)
        place = zeros[:, :-1]
        position = torch.arange(keys, device=number.device)
        moved = torch.where(is_zero, place, ones + position - place)
        number = torch.empty_like(number).scatter_(-1, moved, number)
    return torch.where(enough, threshold, keys)


def _broadcast(inputs: SelectionInputs, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return bias and which keys may be kept, both ``(lists, K)``."""
    heads = shape[-2]

    def lists(tensor: Tensor) -> Tensor:
        with_batch = tensor if tensor.dim() == 4 else tensor.unsqueeze(0)
        by_head = per_query_head(with_batch, heads, with_batch.shape[1]).squeeze(2)
        return by_head.expand(shape if len(shape) == 3 else (1, *shape)).flatten(0, 1)

    bias = lists(inputs.bias)
    visible = ~torch.isnan(bias) & (bias != -torch.inf)
    return bias, visible if inputs.mask is None else visible & lists(inputs.mask)


def _rows(inputs: SelectionInputs, keys: int) -> _Rows:
    device = inputs.bias.device
    cu_q, cu_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    if cu_q is None or cu_k is None:
        cu_q, cu_k = (torch.arange(2, device=device) * n for n in (inputs.queries, keys))
        total = inputs.queries
    else:
        # How many rows there are only the device knows; the sequences have at most these.
        total = inputs.queries * inputs.batch
    # Rows before the first sequence do not count. Wrong bounds must not be indices.
    cu_q, cu_k = cu_q.long() - cu_q[0], cu_k.long().clamp(0, keys)
    row, key = torch.arange(total, device=device), torch.arange(keys, device=device)
    last = max(cu_q.shape[0] - 2, 0)
    sequence = torch.searchsorted(cu_q, row, right=True) - 1
    key_sequence = (torch.searchsorted(cu_k, key, right=True) - 1).clamp(0, last)
    own = sequence.clamp(0, last)
    offset = cu_k.diff() - cu_q.diff()
    low, end = cu_k[own], cu_k[own + 1]
    high = (low + row - cu_q[own] + offset[own] + 1).clamp(min=low, max=end)
    first_row = (key - cu_k[key_sequence] - offset[key_sequence]).clamp(min=0)
    row_begin = cu_q[key_sequence]
    row_count = cu_q[key_sequence + 1] - row_begin
    return _Rows(sequence, low, high, key_sequence, first_row, row_begin, row_count)
