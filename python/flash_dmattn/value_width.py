# SPDX-License-Identifier: BSD-3-Clause
"""Values of another head dimension than keys, for backends that compute with one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .backends.shapes import check_attention
from .dispatch_state import PLAIN_TYPES
from .record import AttentionInputs, Record

__all__ = ["in_one_width", "of_width"]


def in_one_width(inputs: Record) -> Record:
    """Pad query and key, or value, with zeros to the head dimension of the others.

    Zeros change no score, and what they add to out is cut off by `of_width`. Of paged keys and
    values only the pages of ``block_table`` are copied, as far as ``max_seqlen_k`` tells.
    """
    if inputs.block_table is not None:
        inputs = _with_own_pages(inputs, inputs.block_table)
    width = max(inputs.key.shape[-1], inputs.value.shape[-1])
    query, key, value = (
        tensor if tensor.shape[-1] == width else pad(tensor, (0, width - tensor.shape[-1]))
        for tensor in inputs[:3]
    )
    return inputs._replace(query=query, key=key, value=value)


def of_width(out: Tensor, width: int) -> Tensor:
    """Return the first so many columns of out, contiguous."""
    return out if out.shape[-1] == width else out[..., :width].contiguous()


def _with_own_pages(inputs: Record, table: Tensor) -> Record:
    """Copy the pages that sequences may read, each for every place of the table that names it."""
    pages, page = inputs.key.shape[:2]
    if table.dim() != 2 or pages == 0 or page == 0:
        return inputs
    if type(table) in PLAIN_TYPES and table.is_cpu:  # whose values are checked
        call = inputs if isinstance(inputs, AttentionInputs) else inputs.without_lists()
        check_attention(call, any_width=True)
    table = table[:, : min(table.shape[1], -(-inputs.max_seqlen_k // page))]
    # Behind the pages of a sequence the table may hold anything.
    numbers = table.flatten().clamp(0, pages - 1)
    key, value = (tensor.index_select(0, numbers) for tensor in (inputs.key, inputs.value))
    own = torch.arange(numbers.shape[0], dtype=table.dtype, device=table.device)
    return inputs._replace(key=key, value=value, block_table=own.view(table.shape))
