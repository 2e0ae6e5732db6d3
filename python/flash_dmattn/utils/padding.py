# SPDX-License-Identifier: BSD-3-Clause
"""Packing padded batches and back, with the signatures of flash-dmattn 1.2.2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["get_unpad_data", "index_first_axis", "pad_input", "unpad_input", "upad_input"]


def index_first_axis(tensor: Tensor, indices: Tensor) -> Tensor:
    """Return rows of ``tensor`` ``(B, S, ...)`` by their numbers over batch and sequence."""
    return tensor.flatten(0, 1)[indices]


def get_unpad_data(attention_mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """Describe the tokens of a padding mask ``(B, S)``, 1 or True for a token.

    Returns:
        The int64 numbers of the tokens, cu_seqlens int32 ``(B + 1,)``, and the longest sequence's
        length.
    """
    lengths = attention_mask.sum(-1, dtype=torch.int32)
    indices = attention_mask.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return indices, cu_seqlens, longest


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack a padded batch.

    Args:
        hidden_states: ``(B, S, ...)``.
        attention_mask: ``(B, S)``, 1 or True for a token.
        unused_mask: ``(B, S)``, 1 or True for places that are packed too, but are not used.

    Returns:
        The packed ``(total, ...)``, the numbers of the tokens, cu_seqlens int32 ``(B + 1,)``, the
        longest sequence's length, and the used tokens of each sequence, int32 ``(B,)``.
    """
    packed = attention_mask if unused_mask is None else attention_mask + unused_mask
    indices, cu_seqlens, longest = get_unpad_data(packed)
    used = attention_mask.sum(-1, dtype=torch.int32)
    return index_first_axis(hidden_states, indices), indices, cu_seqlens, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put packed tokens ``(total, ...)`` back into ``(batch, seqlen, ...)``, zeros elsewhere."""
    padded = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    padded = padded.index_copy(0, indices, hidden_states)
    return padded.reshape(batch, seqlen, *hidden_states.shape[1:])


def upad_input(
    query_layer: Tensor,
    key_layer: Tensor,
    value_layer: Tensor,
    attention_mask: Tensor,
    query_length: int,
    unpad_input_func: Callable[..., tuple[Any, ...]] = unpad_input,
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor], tuple[int, int]]:
    """Pack query, key and value of one padded batch for the varlen function.

    Args:
        query_layer: ``(B, query_length, H, D)``, the last tokens of each sequence.
        key_layer, value_layer: ``(B, S, Hk, D)``; a longer static cache is cut to the mask.
        attention_mask: ``(B, S)``, 1 or True for a token.
        query_length: rows of query: S, 1, or the last rows of S.
        unpad_input_func: packs the query in the last case.

    Returns:
        query, key, value ``(total, heads, D)``, the numbers of the query's tokens, (cu_seqlens_q,
        cu_seqlens_k) and (max_seqlen_q, max_seqlen_k).
    """
    indices_k, cu_seqlens_k, longest_k = get_unpad_data(attention_mask)
    length = attention_mask.shape[-1]
    key, value = (
        index_first_axis(layer[:, :length], indices_k) for layer in (key_layer, value_layer)
    )
    if query_length == length:
        query, indices_q = index_first_axis(query_layer, indices_k), indices_k
        cu_seqlens_q, longest_q = cu_seqlens_k, longest_k
    elif query_length == 1:
        batch = query_layer.shape[0]
        cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=query_layer.device)
        query, indices_q, longest_q = query_layer.squeeze(1), cu_seqlens_q[:-1], 1
    else:
        query, indices_q, cu_seqlens_q, longest_q, *_ = unpad_input_func(
            query_layer, attention_mask[:, -query_length:]
        )
    return query, key, value, indices_q, (cu_seqlens_q, cu_seqlens_k), (longest_q, longest_k)
