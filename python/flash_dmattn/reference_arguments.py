# SPDX-License-Identifier: BSD-3-Clause
"""Checks of the arguments of `attention_reference`, by the rules of its backend."""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks
from .arguments import check_together, mask_parts, to_4d
from .backends.base import AttentionInputs
from .backends.shapes import check_attention
from .masks import IntervalMask

__all__ = ["check_reference"]

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_NAMES = {"attn_mask": "mask", "attn_bias": "bias", "softmax_scale": "scale"}


def check_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | IntervalMask | None,
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    block_table: Tensor | None,
    scale: float | None,
    causal: bool,
    softcap: float,
) -> tuple[float, bool, float]:
    """Return scale, causal and softcap; raise where the formula would fail or mean nothing.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape, a device or a number does not fit.
    """
    bounds = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    checks.tensor("query", query)
    named = {"key": key, "value": value, "attn_mask": mask, "bias": bias}
    try:
        check_together("query", query, {**named, **bounds, "block_table": block_table})
        for name, given in bounds.items():
            if given is not None:
                checks.bounds(name, given)
        if (cu_seqlens_q is None) != (cu_seqlens_k is None):
            missing = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
            raise ValueError(f"{missing} must be given too: packed sequences need both")
        if block_table is not None and cu_seqlens_k is None:
            raise ValueError("block_table needs cu_seqlens_q and cu_seqlens_k, which are None")
        inputs = _inputs(query, key, value, mask, bias, cu_seqlens_q, cu_seqlens_k, block_table)
        if scale is not None:
            inputs = inputs._replace(scale=checks.number("scale", scale))
        elif query.dim() and query.shape[-1]:
            inputs = inputs._replace(scale=float(query.shape[-1] ** -0.5))
        inputs = inputs._replace(
            causal=checks.flag("causal", causal), softcap=checks.number("softcap", softcap, "")
        )
        check_attention(inputs)
    except (TypeError, ValueError) as error:
        # The rules are those of attention, whose arguments have other names.
        text = str(error)
        for name, own in _NAMES.items():
            text = text.replace(name, own)
        raise type(error)(text) from None
    return inputs.scale, inputs.causal, inputs.softcap


def _inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | IntervalMask | None,
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    block_table: Tensor | None,
) -> AttentionInputs:
    longest_q = longest_k = 0
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        longest_q, longest_k = _longest(cu_seqlens_q), _longest(cu_seqlens_k)
    elif query.dim() == 4 and key.dim() == 4:
        if isinstance(mask, IntervalMask):
            mask.check_query_length(query.shape[1], "attn_mask")
        sizes = {
            "batch": query.shape[0],
            "heads": query.shape[2],
            "kv_heads": key.shape[2],
            "keys": key.shape[1],
        }
        if isinstance(mask, Tensor):
            mask = to_4d("attn_mask", mask, **sizes)
        if bias is not None:
            bias = to_4d("attn_bias", bias, **sizes)
    if bias is not None and bias.dtype in _FLOATS and query.dtype in _FLOATS:
        bias = bias.to(query.dtype)  # the formula computes with any
    plain, start, end = mask_parts(mask)
    return AttentionInputs(
        query,
        key,
        value,
        plain,
        start,
        end,
        bias,
        cu_seqlens_q,
        cu_seqlens_k,
        block_table,
        None,
        longest_q,
        longest_k,
        1.0,
        False,
        0.0,
        False,
    )


def _longest(cu_seqlens: Tensor) -> int:
    if cu_seqlens.is_meta:
        raise ValueError("cu_seqlens_q and cu_seqlens_k must have values, got meta tensors")
    lengths = torch.diff(cu_seqlens)
    return max(0, int(lengths.max())) if lengths.numel() else 0
