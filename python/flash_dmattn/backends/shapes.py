# SPDX-License-Identifier: BSD-3-Clause
"""The rules for shapes and dtypes, for the reference backend; for packs the core checks them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .base import AttentionInputs, SelectionInputs

_MAX_HEAD_DIM = 256


def check_attention(inputs: AttentionInputs, *, read_lengths: bool = True) -> None:
    """Raise TypeError or ValueError, naming the argument, its value and what is allowed.

    Without ``read_lengths`` the values of the cu_seqlens are believed, for their device has them.
    """
    query, key, value = inputs.query, inputs.key, inputs.value
    if not query.dtype.is_floating_point:
        raise TypeError(f"query must have a floating-point dtype, got {query.dtype}")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name} must have query's dtype {query.dtype}, got {tensor.dtype}")
    varlen = inputs.cu_seqlens_q is not None
    paged = inputs.block_table is not None
    if varlen:
        _check_rank("query", query, 3, "(total_q, H, D)")
        layout = (4, "(pages, page, Hk, D) with block_table") if paged else (3, "(total_k, Hk, D)")
    else:
        _check_rank("query", query, 4, "(B, Q, H, D)")
        layout = (4, "(B, K, Hk, D)")
    _check_rank("key", key, *layout)
    _check_rank("value", value, *layout)
    heads, head_dim = query.shape[-2:]
    kv_heads = key.shape[-2]
    if value.shape != key.shape:
        raise ValueError(
            f"value must have key's shape {tuple(key.shape)}, got {tuple(value.shape)}"
        )
    if not 1 <= head_dim <= _MAX_HEAD_DIM:
        raise ValueError(
            f"query must have a head dimension from 1 to {_MAX_HEAD_DIM}, got {head_dim} in "
            f"{tuple(query.shape)}"
        )
    if key.shape[-1] != head_dim:
        raise ValueError(f"key must have query's head dimension {head_dim}, got {key.shape[-1]}")
    if heads == 0 or kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"query's number of heads must be a multiple of key's, got {heads} and {kv_heads}"
        )
    if not varlen and key.shape[0] != query.shape[0]:
        raise ValueError(f"key must have query's batch size {query.shape[0]}, got {key.shape[0]}")
    if not math.isfinite(inputs.scale):
        raise ValueError(f"softmax_scale must be finite, got {inputs.scale}")
    if not (math.isfinite(inputs.softcap) and inputs.softcap >= 0):
        raise ValueError(f"softcap must be finite and at least 0, got {inputs.softcap}")
    if inputs.mask is not None:
        if inputs.start is not None:
            raise ValueError("attn_mask must be a boolean tensor or an IntervalMask, got both")
        if inputs.mask.dtype != torch.bool:
            raise TypeError(f"attn_mask must have dtype torch.bool, got {inputs.mask.dtype}")
    if inputs.bias is not None and inputs.bias.dtype not in (query.dtype, torch.float32):
        raise TypeError(
            f"attn_bias must have query's dtype {query.dtype} or torch.float32, got "
            f"{inputs.bias.dtype}"
        )
    if varlen:
        _check_varlen(inputs, heads, kv_heads, read_lengths=read_lengths)
    else:
        _check_dense(inputs, heads, kv_heads)


def check_selection(inputs: SelectionInputs, *, read_lengths: bool = True) -> None:
    """Raise TypeError or ValueError for what selection cannot work on."""
    if not inputs.bias.dtype.is_floating_point:
        raise TypeError(f"attn_bias must have a floating-point dtype, got {inputs.bias.dtype}")
    if inputs.mask is not None and inputs.mask.dtype != torch.bool:
        raise TypeError(f"attn_mask must have dtype torch.bool, got {inputs.mask.dtype}")
    if inputs.window < 0:
        raise ValueError(f"window_size must be at least 0, got {inputs.window}")
    heads = _head_sizes(inputs.heads, inputs.kv_heads)
    if inputs.cu_seqlens_q is not None and inputs.cu_seqlens_k is not None:
        for name, bounds in (
            ("cu_seqlens_q", inputs.cu_seqlens_q),
            ("cu_seqlens_k", inputs.cu_seqlens_k),
        ):
            _check_cu_seqlens_form(name, bounds)
        total_q = total_k = None
        if read_lengths:
            total_q = _check_lengths("cu_seqlens_q", inputs.cu_seqlens_q, None, inputs.queries)
            total_k = _check_lengths("cu_seqlens_k", inputs.cu_seqlens_k, None, inputs.keys)
        for name, tensor in (("attn_bias", inputs.bias), ("attn_mask", inputs.mask)):
            if tensor is not None:
                _check_packed(name, tensor, heads, total_q, total_k, inputs.keys)
        return
    batches = (1, inputs.batch)
    rows = (1, inputs.queries)
    _check_shape("attn_bias", inputs.bias, (batches, heads, rows, (inputs.keys,)))
    if inputs.mask is not None:
        _check_shape("attn_mask", inputs.mask, (batches, heads, rows, (1, inputs.keys)))


def _check_dense(inputs: AttentionInputs, heads: int, kv_heads: int) -> None:
    batch, queries, keys = inputs.query.shape[0], inputs.query.shape[1], inputs.key.shape[1]
    head_sizes = _head_sizes(heads, kv_heads)
    for name, tensor in (("attn_mask", inputs.mask), ("attn_bias", inputs.bias)):
        if tensor is not None:
            _check_shape(name, tensor, ((1, batch), head_sizes, (1, queries), (1, keys)))
    for name, tensor in (("start", inputs.start), ("end", inputs.end)):
        if tensor is not None:
            _check_shape(f"attn_mask.{name}", tensor, ((1, batch), head_sizes, (keys,)))


def _check_varlen(
    inputs: AttentionInputs, heads: int, kv_heads: int, *, read_lengths: bool
) -> None:
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
        raise ValueError("cu_seqlens_q and cu_seqlens_k must be given together")
    total_q = inputs.query.shape[0]
    total_k = inputs.key.shape[0] if inputs.block_table is None else None
    for name, bounds, total, longest in (
        ("cu_seqlens_q", inputs.cu_seqlens_q, total_q, inputs.max_seqlen_q),
        ("cu_seqlens_k", inputs.cu_seqlens_k, total_k, inputs.max_seqlen_k),
    ):
        _check_cu_seqlens_form(name, bounds)
        if read_lengths:
            end = _check_lengths(name, bounds, total, longest)
            if name == "cu_seqlens_k":
                total_k = end
    batch = inputs.cu_seqlens_q.shape[0] - 1
    if inputs.cu_seqlens_k.shape[0] - 1 != batch:
        raise ValueError(
            f"cu_seqlens_k must have cu_seqlens_q's length {batch + 1}, got "
            f"{inputs.cu_seqlens_k.shape[0]}"
        )
    if inputs.block_table is not None:
        _check_block_table(inputs, inputs.block_table, batch, read_lengths=read_lengths)
    sizes = _head_sizes(heads, kv_heads)
    for name, tensor in (("attn_mask", inputs.mask), ("attn_bias", inputs.bias)):
        if tensor is not None:
            _check_packed(name, tensor, sizes, total_q, total_k, inputs.max_seqlen_k)
    for name, tensor in (("start", inputs.start), ("end", inputs.end)):
        if tensor is not None:
            keys = tensor.shape[-1] if total_k is None else total_k
            _check_shape(f"attn_mask.{name}", tensor, (sizes, (keys,)))


def _check_cu_seqlens_form(name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name} must have dtype torch.int32, got {tensor.dtype}")
    if tensor.dim() != 1 or tensor.shape[0] < 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous with shape (B + 1,), got {tuple(tensor.shape)} with "
            f"stride {tensor.stride()}"
        )


def _check_lengths(name: str, tensor: Tensor, total: int | None, longest: int) -> int:
    """Check the values of a cu_seqlens and return the last."""
    bounds = tensor.tolist()
    lengths = [end - begin for begin, end in itertools.pairwise(bounds)]
    if bounds[0] != 0 or any(length < 0 for length in lengths):
        raise ValueError(f"{name} must begin with 0 and never decrease, got {bounds}")
    if total is not None and bounds[-1] != total:
        raise ValueError(
            f"{name} must end with the number of packed rows {total}, got {bounds[-1]}"
        )
    if lengths and longest < max(lengths):
        raise ValueError(
            f"{name.replace('cu_seqlens', 'max_seqlen')} must be at least the longest sequence's "
            f"{max(lengths)}, got {longest}"
        )
    return int(bounds[-1])


def _check_block_table(
    inputs: AttentionInputs, table: Tensor, batch: int, *, read_lengths: bool
) -> None:
    if table.dtype != torch.int32:
        raise TypeError(f"block_table must have dtype torch.int32, got {table.dtype}")
    pages = 0
    if read_lengths and inputs.cu_seqlens_k is not None and batch > 0:
        # max_seqlen_k may be more than the longest sequence has.
        pages = -(-int(inputs.cu_seqlens_k.diff().max()) // max(inputs.key.shape[1], 1))
    if table.dim() != 2 or table.shape[0] != batch or table.shape[1] < pages:
        raise ValueError(
            f"block_table must have shape (B, pages of the longest sequence) = ({batch}, at least "
            f"{pages}), got {tuple(table.shape)}"
        )


def _check_packed(
    name: str,
    tensor: Tensor,
    heads: Sequence[int],
    total_q: int | None,
    total_k: int | None,
    longest_k: int,
) -> None:
    """Check a packed mask or bias; totals of None are not known, and are believed to fit."""
    _check_rank(name, tensor, 3, "({H|Hk|1}, 1, total_k) or ({H|Hk|1}, total_q, max_seqlen_k)")
    per_key = tensor.shape[1] == 1
    wanted = (1, total_k) if per_key else (total_q, longest_k)
    if tensor.shape[0] not in heads or any(
        known is not None and size != known
        for size, known in zip(tensor.shape[1:], wanted, strict=True)
    ):
        choice = "|".join(map(str, heads))
        q, k = ("any" if total is None else total for total in (total_q, total_k))
        raise ValueError(
            f"{name} must have shape ({{H|Hk|1}}, 1, total_k) = ({choice}, 1, {k}) or "
            f"({{H|Hk|1}}, total_q, max_seqlen_k) = ({choice}, {q}, {longest_k}), where "
            "cu_seqlens_k ends with total_k and cu_seqlens_q with total_q, got "
            f"{tuple(tensor.shape)}"
        )


def _head_sizes(heads: int, kv_heads: int) -> tuple[int, ...]:
    return tuple(sorted({1, kv_heads, heads}))


def _check_rank(name: str, tensor: Tensor, rank: int, shape: str) -> None:
    if tensor.dim() != rank:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")


def _check_shape(name: str, tensor: Tensor, allowed: Sequence[Sequence[int]]) -> None:
    wanted = ", ".join("|".join(map(str, sorted(set(sizes)))) for sizes in allowed)
    if tensor.dim() != len(allowed) or any(
        size not in sizes for size, sizes in zip(tensor.shape, allowed, strict=True)
    ):
        raise ValueError(f"{name} must have shape ({wanted}), got {tuple(tensor.shape)}")
