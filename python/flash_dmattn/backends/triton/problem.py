# SPDX-License-Identifier: BSD-3-Clause
"""A call in the form that the kernels read."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_dmattn.record import AttentionInputs

from .layout import RANGE, Layout, plan_layout

NO_BIAS, KEY_BIAS, ROW_BIAS = 0, 1, 2
_INT32_MAX = 2**31 - 1
UNIT = 8  # elements: the alignment of 16-byte loads of 16-bit elements


class Problem(NamedTuple):
    """The sizes of a call, and the arguments of its kernels."""

    inputs: AttentionInputs
    layout: Layout
    batches: int  # batch size of out; 1 for varlen
    sequences: int  # B
    heads: int
    kv_heads: int
    rows: int  # rows of out; total_q for varlen
    queries: int  # queries of the longest sequence
    total_keys: int  # keys of per-key tensors; total_k for varlen
    keys: int  # keys of the longest sequence
    head_dim: int
    bias_kind: int
    arguments: dict[str, Any]  # tensors, sizes and strides, by the kernels' argument names
    constants: dict[str, Any]

    @property
    def bias_share(self) -> int:
        """The number of query heads that share a head of the bias."""
        return int(self.arguments["bias_share"])


def describe(inputs: AttentionInputs) -> Problem:
    """Return the sizes and arguments of a call whose shapes are checked."""
    layout = plan_layout(inputs)
    heads, head_dim = inputs.query.shape[-2:]
    kv_heads = inputs.key.shape[-2]
    bias_kind, bias = _bias_arguments(inputs, heads)
    query, key, value = (_with_adjacent_elements(t) for t in inputs[:3])
    # Keys that a bias of -inf drops for all rows may be non-finite, and 0 * NaN is NaN. For a
    # per-key bias such keys are zeroed here if possible. Else kernels guard reads by the bias.
    needs_guard = bias_kind == ROW_BIAS
    if bias_kind == KEY_BIAS and inputs.bias is not None:
        needs_guard = inputs.block_table is not None or inputs.bias.shape[-3] > kv_heads
        if not needs_guard:
            dropped = _dropped_keys(inputs.bias)
            key, value = (t.masked_fill(dropped, 0) for t in (key, value))
    if key.stride() != value.stride():
        key, value = key.contiguous(), value.contiguous()
    is_paged, sequences = inputs.block_table is not None, inputs.sequences
    if inputs.packed:
        batches = 1
        rows, queries, keys = query.shape[0], inputs.max_seqlen_q, inputs.max_seqlen_k
        total_keys = _packed_keys(inputs) if is_paged else key.shape[0]
        q_strides = (0, *query.stride()[:2])
        kv_strides = (0, *key.stride()[-3:-1])
    else:
        batches = sequences
        rows = queries = query.shape[1]
        total_keys = keys = key.shape[1]
        q_strides, kv_strides = query.stride()[:3], key.stride()[:3]
    kv_page = key.stride(0) if is_paged else 0
    is_aligned = all(s % UNIT == 0 for s in (head_dim, *q_strides, *kv_strides, kv_page))
    unit = UNIT if is_aligned else 1
    names = ("q_batch", "q_row", "q_head", "kv_batch", "kv_row", "kv_head", "kv_page", "head_dim")
    strides = (*q_strides, *kv_strides, kv_page, head_dim)
    table = None if inputs.block_table is None else _with_adjacent_elements(inputs.block_table)
    arguments: dict[str, Any] = {
        "q": query,
        "k": key,
        "v": value,
        "cu_q": inputs.cu_seqlens_q,
        "cu_k": inputs.cu_seqlens_k,
        "table": table,
        "heads": heads,
        "kv_heads": kv_heads,
        "group": heads // kv_heads,
        "batch_heads": sequences * heads,
        "rows": rows,
        "queries": queries,
        "total_keys": total_keys,
        "keys": keys,
        "page": key.shape[1] if is_paged else 1,
        "page_batch": 0 if table is None else table.stride(0),
        "list_batch": layout.list_heads if layout.list_batches > 1 else 0,
        "list_share": heads // layout.list_heads,
        "list_heads": layout.list_heads,
        "list_keys": layout.list_keys,
        "list_tiles": layout.tiles,
        "sequences": layout.sequences,
        "lists": layout.lists,
        "sink": None if inputs.sink is None else inputs.sink.float().contiguous(),
        "scale": inputs.scale,
        "softcap": inputs.softcap,
        **{name: stride // unit for name, stride in zip(names, strides, strict=True)},
        **bias,
    }
    block_d = padded_head_dim(head_dim)
    constants = {
        "KIND": layout.kind,
        "BIAS": bias_kind,
        "CAUSAL": inputs.causal and layout.kind == RANGE,  # other plans include the causal limit
        "SOFTCAP": inputs.softcap > 0,
        "VARLEN": inputs.packed,
        "PAGED": is_paged,
        "GUARD": needs_guard,
        "UNIT": unit,
        "EVEN": head_dim == block_d,
        "BLOCK_D": block_d,
    }
    return Problem(
        inputs,
        layout,
        batches,
        sequences,
        heads,
        kv_heads,
        rows,
        queries,
        total_keys,
        keys,
        head_dim,
        bias_kind,
        arguments,
        constants,
    )


def padded_head_dim(head_dim: int) -> int:
    """Return the size of the kernels' vectors: a power of two, at least 16, as products need."""
    return max(16, 1 << (head_dim - 1).bit_length())


def _with_adjacent_elements(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _dropped_keys(bias: Tensor) -> Tensor:
    """Return the keys that a per-key bias drops, in the layout of key and value."""
    return (bias.squeeze(-2).transpose(-1, -2) == -torch.inf).unsqueeze(-1)


def _packed_keys(inputs: AttentionInputs) -> int:
    """Return the key count of a paged call's per-key tensors; without any it has no effect."""
    for tensor in (inputs.start, inputs.mask, inputs.bias):
        if tensor is not None and (tensor is inputs.start or tensor.shape[-2] == 1):
            return tensor.shape[-1]
    return _INT32_MAX


def _bias_arguments(inputs: AttentionInputs, heads: int) -> tuple[int, dict[str, Any]]:
    bias = inputs.bias
    if bias is None:
        names = ("bias_batch", "bias_head", "bias_row", "bias_key")
        return NO_BIAS, {"bias": None, "bias_share": 1, **dict.fromkeys(names, 0)}
    kind = KEY_BIAS if bias.shape[-2] == 1 else ROW_BIAS
    if kind == KEY_BIAS:
        bias = bias.float()  # small, and saves one compiled kernel
    strides_and_sizes = zip(bias.stride()[-3:], bias.shape[-3:], strict=True)
    head, row, key = (stride if size > 1 else 0 for stride, size in strides_and_sizes)
    return kind, {
        "bias": bias,
        "bias_batch": bias.stride(0) if bias.dim() == 4 and bias.shape[0] > 1 else 0,
        "bias_head": head,
        "bias_row": row,
        "bias_key": key,
        "bias_share": heads // bias.shape[-3],
    }
