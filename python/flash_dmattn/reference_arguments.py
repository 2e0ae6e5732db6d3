# SPDX-License-Identifier: BSD-3-Clause
"""`attention_reference`, and its argument checks, by the rules of its backend."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from . import checks
from .arguments import check_together, mask_parts, to_4d
from .backends.shapes import check_attention
from .masks import IntervalMask
from .ops import attention
from .record import AttentionInputs, Packing, differentiable_tensors
from .reference import computing_dtype, formula
from .wrong_keywords import hide_unknown_keywords, refuse_keywords

__all__ = ["attention_reference"]

_NAMES = {"attn_mask": "mask", "attn_bias": "bias", "softmax_scale": "scale"}


@hide_unknown_keywords
def attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | IntervalMask | None = None,
    bias: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    block_table: Tensor | None = None,
    **unknown: NoReturn,
) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)`` of dynamic mask attention by its formula.

    Args:
        query: ``(B, Q, H, D)``, or ``(total_q, H, D)`` with ``cu_seqlens_q``; any floating dtype,
            any device.
        key, value: ``(B, K, Hk, D)``, ``(total_k, Hk, D)``, or ``(pages, page, Hk, D)`` with
            ``block_table``; the head dimension of value may differ: Dv.
        mask: bool, True keeps, ``({B|1}, {H|Hk|1}, {Q|1}, {K|1})``, also ``(B, {H|Hk|1}, K)`` and
            ``(B, K)``; varlen ``({H|Hk|1}, 1, total_k)`` or ``({H|Hk|1}, total_q, max_k)``; or an
            `IntervalMask`.
        bias: added to the scaled scores, shapes as ``mask``. -inf means "not kept".
        scale: multiplies the scores; ``D ** -0.5`` by default.
        causal: row i sees keys ``j <= i + K - Q``.
        softcap: if positive, scores become ``softcap * tanh(score / softcap)`` before the bias is
            added.
        sink: ``(H,)``, one more score in the sum of each row's softmax, without a key or a value.
        cu_seqlens_q, cu_seqlens_k: int32 ``(B + 1,)``: 0, then where each packed sequence ends.
        block_table: int32 ``(B, pages of a sequence)``, the page numbers of each sequence.

    Returns:
        ``out`` ``(B, Q, H, Dv)``, or ``(total_q, H, Dv)``, of query's dtype, and ``lse`` ``(B, H,
        Q)`` (varlen ``(H, total_q)``), float32 or float64, natural logarithm, without the sink. A
        row that keeps no key has output 0 and lse -inf.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape, a device or a number does not fit.
    """
    if unknown:
        refuse_keywords(attention_reference, unknown)
    packing = Packing(cu_seqlens_q, cu_seqlens_k, block_table)
    inputs = check_reference(query, key, value, mask, bias, scale, causal, softcap, sink, packing)
    if inputs.packed and torch.compiler.is_compiling():
        return _by_operator(inputs)
    return formula(inputs)


def _by_operator(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Compute by the operator: compiled code cannot read the lengths of packed sequences."""
    dtype = computing_dtype(inputs.query, inputs.bias)
    # The operator takes fewer combinations of dtypes than the formula.
    tensors = differentiable_tensors(inputs).items()
    same: dict[str, Any] = {name: None if t is None else t.to(dtype) for name, t in tensors}
    out, lse = attention(inputs._replace(**same), "reference", need_lse=True)
    assert lse is not None
    return out.to(inputs.query.dtype), lse


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
