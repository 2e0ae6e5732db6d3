# SPDX-License-Identifier: BSD-3-Clause
"""Argument checks of `attention_reference`, by the rules of its backend."""

from __future__ import annotations

from torch import Tensor

from . import checks
from .arguments import check_together, mask_parts, to_4d
from .backends.shapes import check_attention
from .masks import IntervalMask
from .record import AttentionInputs, Packing

_NAMES = {"attn_mask": "mask", "attn_bias": "bias", "softmax_scale": "scale"}


def check_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | IntervalMask | None,
    bias: Tensor | None,
    scale: float | None,
    causal: bool,
    softcap: float,
    sink: Tensor | None,
    packing: Packing,
) -> AttentionInputs:
    """Return the record of a call; raise if the formula would fail or be undefined.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape, a device or a number does not fit.
    """
    packing_fields = packing._asdict()
    bounds = {name: packing_fields[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    checks.tensor("query", query)
    named = {"key": key, "value": value, "attn_mask": mask, "bias": bias, "sink": sink}
    try:
        check_together("query", query, {**named, **bounds, "block_table": packing.block_table})
        for name, tensor in bounds.items():
            if tensor is not None:
                checks.cu_seqlens(name, tensor)
        missing = [name for name, tensor in bounds.items() if tensor is None]
        if len(missing) == 1:
            raise ValueError(f"{missing[0]} must be given too: packed sequences need both")
        if packing.block_table is not None and missing:
            raise ValueError("block_table needs cu_seqlens_q and cu_seqlens_k, which are None")
        if scale is not None:
            scale = checks.number("scale", scale)
        elif query.dim() and query.shape[-1]:
            scale = float(query.shape[-1] ** -0.5)
        else:
            scale = 1.0
        inputs = _inputs(query, key, value, mask, bias, packing)._replace(
            scale=scale,
            causal=checks.flag("causal", causal),
            softcap=checks.number("softcap", softcap, ""),
            sink=sink,
        )
        check_attention(_in_query_dtype(inputs), allows_other_value_dim=True)
    except (TypeError, ValueError) as error:
        # Translate the argument names of flash_dmattn_func, whose rules these are.
        text = str(error)
        for name, name_here in _NAMES.items():
            text = text.replace(name, name_here)
        raise type(error)(text) from None
    return inputs


def _inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | IntervalMask | None,
    bias: Tensor | None,
    packing: Packing,
) -> AttentionInputs:
    if packing.cu_seqlens_q is not None and packing.cu_seqlens_k is not None:
        packing = packing._replace(
            max_seqlen_q=checks.read_max_seqlen("cu_seqlens_q", packing.cu_seqlens_q),
            max_seqlen_k=checks.read_max_seqlen("cu_seqlens_k", packing.cu_seqlens_k),
        )
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
    parts = mask_parts(mask)._asdict()
    return AttentionInputs(query, key, value, bias=bias, **parts, **packing._asdict())


def _in_query_dtype(inputs: AttentionInputs) -> AttentionInputs:
    """Return a call whose bias and sink dtypes pass the checks. The formula takes any dtypes."""
    dtype = inputs.query.dtype
    if dtype not in checks.FLOATS:
        return inputs
    bias, sink = (
        t.to(dtype) if t is not None and t.dtype in checks.FLOATS else t
        for t in (inputs.bias, inputs.sink)
    )
    return inputs._replace(bias=bias, sink=sink)
