# SPDX-License-Identifier: BSD-3-Clause
"""Memory locations of the keys of each query. Rows are those of all sequences, concatenated."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_dmattn.record import KeyListInputs


class VisibleKeys(NamedTuple):
    """The keys that each row may see; integers ``(rows,)``."""

    sequence: Tensor
    begin: Tensor  # the first key of its sequence, numbered through all sequences
    limit: Tensor  # how many keys of its sequence it may see


def visible_keys(inputs: KeyListInputs) -> VisibleKeys:
    """Return the keys that each row of a call may see.

    Checking the cu_seqlens would synchronize with a GPU, so any values are clamped to the bounds of
    the tensors. Rows outside all sequences see no key.
    """
    device = inputs.query.device
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
        batch, queries, keys = *inputs.query.shape[:2], inputs.key.shape[1]
        row = torch.arange(batch * queries, device=device)
        sequence = row // max(queries, 1)
        limit = torch.full_like(row, keys)
        if inputs.causal:
            limit = (row % max(queries, 1) + (keys - queries + 1)).clamp(0, keys)
        return VisibleKeys(sequence, sequence * keys, limit)
    rows, sequences = inputs.query.shape[0], inputs.sequences
    row = torch.arange(rows, device=device)
    if sequences == 0:
        return VisibleKeys(row, torch.zeros_like(row), torch.zeros_like(row))
    table, keys = inputs.block_table, inputs.key.shape[0]
    if table is not None:
        keys = max(1, sequences) * table.shape[1] * inputs.key.shape[1]
    q_bounds = inputs.cu_seqlens_q.to(torch.int64).clamp(0, rows)
    k_bounds = inputs.cu_seqlens_k.to(torch.int64).clamp(0, keys)
    after = torch.searchsorted(q_bounds[1:].contiguous(), row, right=True)
    sequence = after.clamp(max=sequences - 1)
    counts = (k_bounds[1:] - k_bounds[:-1]).clamp(min=0)
    if table is not None:
        counts = counts.clamp(max=table.shape[1] * inputs.key.shape[1])
    limit = counts[sequence]
    if inputs.causal:
        rows_to_end = q_bounds[1:][sequence] - row  # from the row to the end of its sequence
        limit = (limit - rows_to_end + 1).clamp(min=0)
    limit = limit.masked_fill((after >= sequences) | (row < q_bounds[sequence]), 0)
    return VisibleKeys(sequence, k_bounds[:-1][sequence], limit)


def by_head(tensor: Tensor, *, packed: bool) -> Tensor:
    """View ``(B, h, Q, k)``, or packed ``(h, total_q, k)``, as ``(h, rows, k)``."""
    return tensor if packed else tensor.transpose(0, 1).flatten(1, 2)


def key_rows(inputs: KeyListInputs, rows: VisibleKeys, listed: Tensor) -> Tensor:
    """Return the rows of key and value that hold listed keys, whose indices are in range.

    Args:
        inputs: of the call.
        rows: some of its rows.
        listed: ``(h, rows, k)``.
    """
    if inputs.block_table is None:
        return rows.begin[:, None] + listed
    page = max(inputs.key.shape[1], 1)
    # An index in range is on a page of the table. The extra column serves rows without keys.
    table = torch.nn.functional.pad(inputs.block_table, (0, 1)).to(listed.dtype)
    return table[rows.sequence[:, None], listed // page] * page + listed % page


def bias_strides(inputs: KeyListInputs, rows: VisibleKeys) -> tuple[Tensor, int, int]:
    """Return the index of each row's first key at head 0 in a contiguous bias, and the strides of
    heads and keys.
    """
    bias = inputs.bias
    assert bias is not None
    heads, keys = bias.shape[-3], bias.shape[-1]
    head = keys if heads > 1 else 0
    if inputs.packed:
        return rows.begin, head, 1
    return rows.sequence * (heads * keys if bias.shape[0] > 1 else 0), head, int(keys > 1)
