# SPDX-License-Identifier: BSD-3-Clause
"""Values whose head dimension differs from that of keys, for backends that support only one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .backends.shapes import check_attention
from .dispatch_state import PLAIN_TYPES
from .record import AttentionInputs, Record

__all__ = ["pad_to_one_head_dim", "serves_narrow_values"]

# Up to this many queries, kernels with several heads in a row tile are faster, on padded values.
_FEW_QUERIES = 128


def serves_narrow_values(
    inputs: AttentionInputs, widths: tuple[int, int], *, needs_backward: bool
) -> bool:
    """Say whether kernels for narrow values serve a call.

    Args:
        inputs: of the call, whose value has another head dimension than its query and key.
        widths: the `Backend.narrow_widths`.
        needs_backward: whether the call also needs a backward pass.
    """
    head_dim, value_dim = inputs.query.shape[-1], inputs.value.shape[-1]
    max_head_dim, max_value_dim = widths
    if not (value_dim <= max_value_dim < head_dim <= max_head_dim) or value_dim % 8 or head_dim % 8:
        return False
    queries = inputs.max_seqlen_q if inputs.packed else inputs.query.shape[1]
    if inputs.block_table is not None or queries <= _FEW_QUERIES:
        return False
    bias_heads, bias_rows = _heads_and_rows(inputs.bias, inputs)
    if bias_rows != 1 or not needs_backward:
        return bias_rows == 1
    mask_heads, mask_rows = _heads_and_rows(inputs.mask, inputs)
    start_heads = 1 if inputs.start is None else inputs.start.shape[-2]
    # For a backward pass, heads that share keys must keep the same keys with the same biases.
    heads, kv_heads = inputs.query.shape[-2], inputs.key.shape[-2]
    is_shareable = heads == kv_heads or heads not in (bias_heads, mask_heads, start_heads)
    return is_shareable and mask_rows == 1 and not (inputs.deterministic or inputs.softcap > 0)


def _heads_and_rows(tensor: Tensor | None, inputs: AttentionInputs) -> tuple[int, int]:
    """Return the numbers of heads and rows of a mask or a bias; 1 and 1 if there is none."""
    if tensor is None:
        return 1, 1
    if tensor.dim() == 3 and not inputs.packed:
        return tensor.shape[1], 1
    return tensor.shape[-3], tensor.shape[-2]


def pad_to_one_head_dim(inputs: Record) -> Record:
    """Pad query and key, or value, with zeros to the larger head dimension.

    Zeros change no score, and `base.first_columns` removes the extra columns of out. For paged keys
    and values only the pages of ``block_table``, as far as ``max_seqlen_k`` reaches, are copied.
    """
    if inputs.block_table is not None:
        inputs = _with_own_pages(inputs, inputs.block_table)
    head_dim = max(inputs.key.shape[-1], inputs.value.shape[-1])
    query, key, value = (
        tensor if tensor.shape[-1] == head_dim else pad(tensor, (0, head_dim - tensor.shape[-1]))
        for tensor in inputs[:3]
    )
    return inputs._replace(query=query, key=key, value=value)


def _with_own_pages(inputs: Record, table: Tensor) -> Record:
    """Copy the pages that sequences may read, one copy for each entry of the table."""
    pages, page = inputs.key.shape[:2]
    if table.dim() != 2 or pages == 0 or page == 0:
        return inputs
    if type(table) in PLAIN_TYPES and table.is_cpu:  # the table's values are checked on CPUs
        call = inputs if isinstance(inputs, AttentionInputs) else inputs.without_lists()
        check_attention(call, allows_other_value_dim=True)
    table = table[:, : min(table.shape[1], -(-inputs.max_seqlen_k // page))]
    # Table entries beyond the pages of a sequence are arbitrary.
    numbers = table.flatten().clamp(0, pages - 1)
    key, value = (tensor.index_select(0, numbers) for tensor in (inputs.key, inputs.value))
    page_numbers = torch.arange(numbers.shape[0], dtype=table.dtype, device=table.device)
    return inputs._replace(key=key, value=value, block_table=page_numbers.view(table.shape))
