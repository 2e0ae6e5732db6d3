# SPDX-License-Identifier: BSD-3-Clause
"""Keeping the keys with the largest bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import ops
from .arguments import backend_name, check_tensors, index, to_4d, without_expansion
from .backends.base import SelectionInputs
from .masks import IntervalMask

__all__ = ["dynamic_mask"]


def dynamic_mask(
    attn_bias: Tensor,
    window_size: int,
    is_causal: bool = False,
    attention_mask: Tensor | None = None,
    *,
    query_length: int | None = None,
    key_length: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    backend: str | None = None,
) -> Tensor | IntervalMask:
    """Keep, for each query, the keys with the largest bias among those that it can see.

    Ties go to the lower key index, so that exactly ``window_size`` keys are kept wherever that many
    can be seen. NaN and -inf biases are never kept. No gradient flows through the choice.

    Args:
        attn_bias: ``({B|1}, {H|Hk|1}, {Q|1}, {K|1})``, or the same for every query: ``(B, {H|Hk|1},
            K)`` or ``(B, K)``; with the cu_seqlens ``({H|Hk|1}, 1, total_k)`` or ``({H|Hk|1},
            total_q, max_seqlen_k)``. float32, float16 or bfloat16; float64 with
            ``backend="reference"``.
        window_size: keys to keep, at least 0.
        is_causal: query i sees keys ``j <= i + K - Q`` only.
        attention_mask: bool, True where a key can be seen; shapes as ``attn_bias``, and
            broadcasting against it.
        query_length: Q, which a causal selection from a bias per key needs; by default K.
        key_length: K, which a bias and a mask whose last dimension is 1 do not tell: such a bias
            is the same for all K keys.
        num_heads, num_kv_heads: H and Hk; needed only where both head counts appear but cannot be
            told apart.
        cu_seqlens_q, cu_seqlens_k: int32 ``(B + 1,)``, for packed sequences, with max_seqlen_q and
            max_seqlen_k.
        max_seqlen_q, max_seqlen_k: lengths of the longest sequence; by default read from the
            device.
        backend: as in `flash_dmattn_func`.

    Returns:
        For a causal selection from a bias and mask that are the same for every query, an
        `IntervalMask`. Otherwise a bool tensor: ``({B|1}, {H|Hk|1}, 1, K)``, the top keys of all
        queries alike, or with a row for each query if the bias or the mask has one.

    Raises:
        TypeError: a tensor has the wrong type or dtype.
        ValueError: a shape does not fit, window_size is negative, or K is not known.
    """
    if not isinstance(attn_bias, Tensor):
        raise TypeError(
            f"attn_bias must be a torch.Tensor, got {type(attn_bias).__name__}: {attn_bias!r}"
        )
    check_tensors(
        attn_bias,
        attention_mask=attention_mask,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
    )
    window = index("window_size", window_size)
    if window < 0:
        raise ValueError(f"window_size must be at least 0, got {window_size}")
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise TypeError(
            "attention_mask must have dtype torch.bool (True: can be seen), got "
            f"{attention_mask.dtype}"
        )
    name = backend_name(backend)
    if attn_bias.dtype == torch.float64 and name != "reference":
        raise TypeError(
            "attn_bias has dtype torch.float64, which kernels do not select from; convert to "
            "torch.float32, or pass "
            'backend="reference"'
        )
    bias = attn_bias.detach()
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        inputs = _packed_inputs(
            bias, attention_mask, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        )
    else:
        inputs = _dense_inputs(bias, attention_mask, query_length, key_length)
    heads = [t.shape[-3] for t in (inputs["bias"], inputs["mask"]) if t is not None]
    heads = [count for count in heads if count != 1] or [1]
    selection = SelectionInputs(
        **inputs,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        heads=max(heads) if num_heads is None else num_heads,
        kv_heads=min(heads) if num_kv_heads is None else num_kv_heads,
        window=window,
        causal=bool(is_causal),
    )
    per_key = all(t is None or t.shape[-2] == 1 for t in (selection.bias, selection.mask))
    if is_causal and per_key:
        start, end = ops.select_intervals(selection, name)
        rows = None if selection.cu_seqlens_q is not None else selection.queries
        return IntervalMask(start, end, query_length=rows)
    return ops.select_keep(selection, name)


def _dense_inputs(
    bias: Tensor, mask: Tensor | None, query_length: int | None, key_length: int | None
) -> dict[str, Any]:
    given = [bias] if mask is None else [bias, mask]
    keys = _key_length(given, key_length)
    batch = next((t.shape[0] for t in given if t.dim() and t.shape[0] != 1), 1)
    bias_4d, mask_4d = (
        to_4d(name, tensor, batch=batch, heads=heads, kv_heads=heads, keys=keys)
        for name, tensor, heads in (
            # Any number of heads: what they are is seen from all tensors, and checked with them.
            ("attn_bias", bias, bias.shape[1] if bias.dim() == 3 else 1),
            ("attention_mask", mask, mask.shape[1] if mask is not None and mask.dim() == 3 else 1),
        )
    )
    assert bias_4d is not None
    if bias_4d.shape[3] == 1:
        bias_4d = bias_4d.expand(-1, -1, -1, keys)  # equal biases, of which the first are kept
    bias_4d, mask_4d = without_expansion(bias_4d, 3), without_expansion(mask_4d, 4)
    assert bias_4d is not None
    rows = [t.shape[2] for t in (bias_4d, mask_4d) if t is not None and t.shape[2] != 1]
    if query_length is None:
        query_length = rows[0] if rows else keys
    return {
        "bias": bias_4d,
        "mask": mask_4d,
        "batch": batch,
        "queries": index("query_length", query_length),
        "keys": keys,
    }


def _key_length(given: list[Tensor], key_length: int | None) -> int:
    """Return K, by the argument or by the first tensor that has a size for each key."""
    if key_length is not None:
        return index("key_length", key_length)
    for tensor in given:
        if tensor.dim() and tensor.shape[-1] != 1:
            return tensor.shape[-1]
    raise ValueError(
        "key_length must be given where the last dimension of attn_bias and attention_mask is 1, "
        f"which serves any number of keys; got {' and '.join(str(tuple(t.shape)) for t in given)}"
    )


def _packed_inputs(
    bias: Tensor,
    mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> dict[str, Any]:
    if cu_seqlens_q is None or cu_seqlens_k is None:
        missing = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise ValueError(f"{missing} must be given too: packed sequences need both")
    for name, tensor in (("attn_bias", bias), ("attention_mask", mask)):
        if tensor is not None and tensor.dim() != 3:
            raise ValueError(
                f"{name} must have shape ({{H|Hk|1}}, 1, total_k) or ({{H|Hk|1}}, total_q, "
                f"max_seqlen_k) for packed sequences, got {tuple(tensor.shape)}"
            )
    return {
        "bias": without_expansion(bias, 1),
        "mask": without_expansion(mask, 1),
        "batch": cu_seqlens_q.shape[0] - 1,
        "queries": _longest(cu_seqlens_q) if max_seqlen_q is None else max_seqlen_q,
        "keys": _longest(cu_seqlens_k) if max_seqlen_k is None else max_seqlen_k,
    }


def _longest(cu_seqlens: Tensor) -> int:
    if cu_seqlens.numel() < 2:
        return 0
    return int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
