# SPDX-License-Identifier: BSD-3-Clause
"""Packing of padded batches and its inverse, with the signatures of flash-dmattn 1.2.2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import checks

__all__ = ["get_unpad_data", "index_first_axis", "pad_input", "unpad_input", "upad_input"]


def index_first_axis(tensor: Tensor, indices: Tensor) -> Tensor:
    """Return rows of ``tensor`` ``(B, S, ...)`` by flat indices over batch and sequence.

    Raises:
        TypeError: an argument is not a tensor, or indices does not hold integers.
        ValueError: tensor has fewer than two dimensions, or an index is out of range.
    """
    checks.tensor("tensor", tensor)
    if tensor.dim() < 2:
        raise ValueError(f"tensor must have shape (B, S, ...), got {tuple(tensor.shape)}")
    _check_indices(indices, tensor, tensor.shape[0] * tensor.shape[1])
    return tensor.flatten(0, 1)[indices]


def get_unpad_data(attention_mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """Describe the tokens of a padding mask ``(B, S)``, 1 or True for a token.

    Returns:
        The int64 flat indices of the tokens, cu_seqlens int32 ``(B + 1,)``, and the longest
        sequence's length.

    Raises:
        TypeError: attention_mask is not a tensor of booleans or integers.
        ValueError: it does not have two dimensions.
    """
    _check_padding("attention_mask", attention_mask)
    checks.check_values("attention_mask", attention_mask)
    lengths = attention_mask.sum(-1, dtype=torch.int32)
    indices = attention_mask.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    max_seqlen = int(lengths.max()) if lengths.numel() else 0
    return indices, cu_seqlens, max_seqlen


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack a padded batch.

    Args:
        hidden_states: ``(B, S, ...)``.
        attention_mask: ``(B, S)``, 1 or True for a token.
        unused_mask: ``(B, S)``, 1 or True for positions that are also packed, but not used.

    Returns:
        The packed ``(total, ...)``, the indices of the tokens, cu_seqlens int32 ``(B + 1,)``, the
        longest sequence's length, and the number of used tokens of each sequence, int32 ``(B,)``.

    Raises:
        TypeError: an argument is not a tensor, or a mask holds neither booleans nor integers.
        ValueError: a shape does not fit.
    """
    _check_rows("hidden_states", hidden_states, attention_mask)
    if unused_mask is not None:
        _check_rows("unused_mask", unused_mask, attention_mask)
        _check_padding("unused_mask", unused_mask)
    packed = attention_mask if unused_mask is None else attention_mask + unused_mask
    indices, cu_seqlens, max_seqlen = get_unpad_data(packed)
    used = attention_mask.sum(-1, dtype=torch.int32)
    return index_first_axis(hidden_states, indices), indices, cu_seqlens, max_seqlen, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put packed tokens ``(total, ...)`` back into ``(batch, seqlen, ...)``, zeros elsewhere.

    Raises:
        TypeError: an argument is not a tensor or not an integer, or indices does not hold integers.
        ValueError: a size is negative, the numbers of indices and tokens differ, or an index is
            outside of the batch.
    """
    checks.tensor("hidden_states", hidden_states)
    batch = checks.index("batch", batch, 0, checks.MAX_ROWS)
    seqlen = checks.index("seqlen", seqlen, 0, checks.MAX_ROWS)
    _check_indices(indices, hidden_states, batch * seqlen)
    if hidden_states.dim() < 1 or indices.shape[0] != hidden_states.shape[0]:
        raise ValueError(
            "hidden_states must have a row for each of indices, got shapes "
            f"{tuple(hidden_states.shape)} and {tuple(indices.shape)}"
        )
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
        query_length: rows of query: S, 1, or fewer than S, the last rows.
        unpad_input_func: packs the query in the last case.

    Returns:
        query, key, value ``(total, heads, D)``, the indices of the query's tokens, (cu_seqlens_q,
        cu_seqlens_k) and (max_seqlen_q, max_seqlen_k).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape does not fit.
    """
    _check_padding("attention_mask", attention_mask)
    length, query_length = attention_mask.shape[1], checks.index("query_length", query_length, 0)
    _check_layers(query_layer, key_layer, value_layer, attention_mask, query_length)
    if not callable(unpad_input_func):
        checks.refuse_type("unpad_input_func", "a function", unpad_input_func)
    indices_k, cu_seqlens_k, longest_k = get_unpad_data(attention_mask)
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


def _check_padding(name: str, mask: Tensor) -> None:
    checks.tensor(name, mask)
    if mask.dtype != torch.bool and mask.dtype not in checks.INTEGERS:
        raise TypeError(f"{name} must hold booleans or integers, got {mask.dtype}")
    if mask.dim() != 2:
        raise ValueError(f"{name} must have shape (B, S), got {tuple(mask.shape)}")


def _check_rows(name: str, tensor: Tensor, attention_mask: Tensor) -> None:
    """Raise unless a tensor begins with the dimensions of the mask."""
    _check_padding("attention_mask", attention_mask)
    rows = tuple(attention_mask.shape)
    if tuple(checks.tensor(name, tensor).shape[:2]) != rows:
        raise ValueError(
            f"{name} must begin with attention_mask's shape {rows}, got {tuple(tensor.shape)}"
        )
    checks.same_device(name, tensor, "attention_mask's device", attention_mask.device)


def _check_indices(indices: Tensor, tensor: Tensor, rows: int) -> None:
    checks.tensor("indices", indices, "a torch.Tensor of integers")
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices must have dtype torch.int64 or torch.int32, got {indices.dtype}")
    if indices.dim() != 1:
        raise ValueError(f"indices must have shape (total,), got {tuple(indices.shape)}")
    checks.same_device("indices", indices, "the device of what they index,", tensor.device)
    # Reading values on a GPU would synchronize.
    if indices.device.type != "cpu" or torch.compiler.is_compiling() or indices.numel() == 0:
        return
    lowest, highest = int(indices.min()), int(indices.max())
    if lowest < 0 or highest >= rows:
        raise ValueError(
            f"indices must be at least 0 and below {rows}, the number of rows, got {lowest} to "
            f"{highest}"
        )


def _check_layers(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, query_length: int
) -> None:
    (batch, length), device = attention_mask.shape, attention_mask.device
    least = {"query_layer": query_length, "key_layer": length, "value_layer": length}
    for (name, rows), layer in zip(least.items(), (query, key, value), strict=True):
        shape = tuple(checks.tensor(name, layer).shape)
        fits = len(shape) == 4 and shape[0] == batch and shape[1] >= rows
        if not fits or (name == "query_layer" and shape[1] != rows):
            raise ValueError(
                f"{name} must have shape ({batch}, {rows}, heads, D) to go with attention_mask "
                f"{tuple(attention_mask.shape)} and query_length {query_length}, got {shape}"
            )
        checks.same_device(name, layer, "attention_mask's device", device)
    if query_length > length:
        raise ValueError(
            f"query_length must be at most attention_mask's {length}, got {query_length}"
        )
