# SPDX-License-Identifier: BSD-3-Clause
"""Keeping the keys with the largest bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import checks, ops
from .arguments import (
    backend_name,
    check_together,
    flag,
    index,
    mask_parts,
    to_4d,
    without_expansion,
)
from .backends.base import SelectionInputs
from .checks import MOST_ROWS
from .masks import IntervalMask

__all__ = [
    "composable_mask",
    "dynamic_mask",
    "is_one_row",
    "keeps_all",
    "select",
    "select_packed",
    "selectable_bias",
    "without_nan",
]

# Without the question, as in torch < 2.7, what is compiled may be exported.
_is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


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
    others = {
        "attention_mask": attention_mask,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
    }
    check_together("attn_bias", checks.tensor("attn_bias", attn_bias), others)
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise TypeError(
            "attention_mask must have dtype torch.bool (True: can be seen), got "
            f"{attention_mask.dtype}"
        )
    options: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "window_size": window_size,
        "causal": flag("is_causal", is_causal),
        "backend": backend_name(backend),
    }
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        packing = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return select_packed(attn_bias, attention_mask, "attention_mask", packing, **options)
    inputs = _dense_inputs(attn_bias, attention_mask, query_length, key_length)
    return _select_with_heads(inputs, "attention_mask", **options)


def select_packed(
    bias: Tensor,
    mask: Tensor | None,
    mask_name: str,
    packing: tuple[Tensor | None, Tensor | None, int | None, int | None],
    **options: Any,
) -> Tensor | IntervalMask:
    """Do what `dynamic_mask` does for packed sequences; the mask is called as the caller does.

    Args:
        bias, mask: of three dimensions.
        mask_name: for messages.
        packing: cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k.
        **options: num_heads, num_kv_heads, window_size, causal and backend.
    """
    inputs = _packed_inputs(bias, mask, mask_name, *packing)
    return _select_with_heads(inputs, mask_name, *packing[:2], **options)


def _select_with_heads(
    inputs: dict[str, Any],
    mask_name: str,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    num_heads: int | None,
    num_kv_heads: int | None,
    **options: Any,
) -> Tensor | IntervalMask:
    counts = [t.shape[-3] for t in (inputs["bias"], inputs["mask"]) if t is not None]
    counts = [count for count in counts if count != 1] or [1]
    heads = max(counts) if num_heads is None else index("num_heads", num_heads, 1)
    kv_heads = min(counts) if num_kv_heads is None else index("num_kv_heads", num_kv_heads, 1)
    if kv_heads and heads % kv_heads:
        given = "num_heads" if num_kv_heads is None else "num_kv_heads"
        raise ValueError(
            f"{given}: the number of query heads must be a multiple of the number of key heads, "
            f"got {heads} and {kv_heads}"
        )
    if inputs["mask"] is not None:
        _check_mask(mask_name, inputs, heads, kv_heads)
    return select(
        **inputs,
        heads=heads,
        kv_heads=kv_heads,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        **options,
    )


def select(
    bias: Tensor,
    mask: Tensor | None,
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    window_size: int,
    causal: bool,
    backend: str,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor | IntervalMask:
    """Do what `dynamic_mask` does, with its bias and mask in 4 dimensions, or 3 of a packed batch.

    Raises:
        TypeError, ValueError: as `dynamic_mask`.
    """
    window = index("window_size", window_size, 0)
    if bias.dtype == torch.float64 and backend != "reference":
        raise TypeError(
            "attn_bias has dtype torch.float64, which kernels do not select from; convert to "
            "torch.float32, or pass "
            'backend="reference"'
        )
    bias = bias.detach()
    if cu_seqlens_q is not None:
        # Only the head dimension, as in attention.
        bias, mask = without_expansion(bias, 1), without_expansion(mask, 1)
    else:
        if bias.shape[3] == 1:
            bias = bias.expand(-1, -1, -1, keys)  # equal biases, of which the first are kept
        bias, mask = without_expansion(bias, 3), without_expansion(mask, 4)
    selection = SelectionInputs(
        bias,
        mask,
        cu_seqlens_q,
        cu_seqlens_k,
        batch,
        heads,
        kv_heads,
        queries,
        keys,
        window,
        causal,
    )
    if causal and bias.shape[-2] == 1 and (mask is None or mask.shape[-2] == 1):
        start, end = ops.select_intervals(selection, backend)
        return IntervalMask(start, end, query_length=queries if cu_seqlens_q is None else None)
    return ops.select_keep(selection, backend)


def is_one_row(queries: int) -> bool:
    """Say whether there is one query, which sees all keys; not asked of sizes that are compiled or
    traced.
    """
    return not torch.compiler.is_compiling() and type(queries) is int and queries == 1


def keeps_all(window_size: int, keys: int) -> bool:
    """Say whether a window is known to drop no keys but those whose bias is NaN or -inf.

    Sizes that a program is exported or traced with do not tell of those that it will get; then the
    answer is no, and selection runs, which is right for all.
    """
    window = index("window_size", window_size, 0)
    if torch.compiler.is_compiling():
        return not _is_exporting() and window >= keys
    return type(keys) is int and window >= keys


def without_nan(bias: Tensor) -> Tensor:
    """Return a bias for attention without selection which drops what a selection never keeps.

    -inf is "not kept" to attention too; NaN becomes so.
    """
    bias = without_expansion(bias, 4 if bias.dim() == 4 else 1)
    return bias.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def selectable_bias(bias: Tensor | None, batch: int | None = None) -> Tensor:
    """Return the bias that attention selects by; ValueError if it is absent or does not fit."""
    if bias is None:
        raise ValueError(
            "window_size selects the keys with the largest attn_bias, but attn_bias is None; pass "
            "a bias, or an IntervalMask.sliding_window as attn_mask to keep the nearest keys"
        )
    # Otherwise the selection would have the wrong batch size, and be blamed for it.
    if batch is not None and bias.shape[0] not in (1, batch):
        raise ValueError(
            f"attn_bias must have batch size {batch} or 1, as query, got {tuple(bias.shape)}"
        )
    return bias


def composable_mask(mask: Tensor | IntervalMask | None) -> Tensor | None:
    """Return the mask that attention selects within; ValueError for an `IntervalMask`."""
    if isinstance(mask, IntervalMask):
        raise ValueError(
            "window_size cannot be combined with an IntervalMask as attn_mask; pass a boolean "
            "mask, which attn_mask.to_bool(query_length) is for dense problems; or select with "
            "dynamic_mask and combine the masks with &, which drops what the window kept of other "
            "keys"
        )
    return mask_parts(mask)[0]


def _dense_inputs(
    bias: Tensor, mask: Tensor | None, query_length: int | None, key_length: int | None
) -> dict[str, Any]:
    given = [bias] if mask is None else [bias, mask]
    for name, tensor in (("attn_bias", bias), ("attention_mask", mask)):
        if tensor is not None and tensor.dim() not in (2, 3, 4):
            raise ValueError(
                f"{name} must have shape ({{B|1}}, {{H|Hk|1}}, {{Q|1}}, {{K|1}}), "
                f"(B, {{H|Hk|1}}, K) or (B, K), got {tuple(tensor.shape)}"
            )
    keys = _key_length(given, key_length)
    batch = next((t.shape[0] for t in given if t.dim() and t.shape[0] != 1), 1)

    def in_4d(name: str, tensor: Tensor) -> Tensor:
        # Any number of heads: what they are is seen from all tensors, and checked with them.
        heads = tensor.shape[1] if tensor.dim() == 3 else 1
        # Bias and mask broadcast against each other.
        own_batch = 1 if tensor.dim() and tensor.shape[0] == 1 else batch
        return to_4d(name, tensor, batch=own_batch, heads=heads, kv_heads=heads, keys=keys)

    bias = in_4d("attn_bias", bias)
    mask = None if mask is None else in_4d("attention_mask", mask)
    if query_length is None:
        rows = [t.shape[2] for t in (bias, mask) if t is not None and t.shape[2] != 1]
        query_length = rows[0] if rows else keys
    return {
        "bias": bias,
        "mask": mask,
        "batch": batch,
        "queries": index("query_length", query_length, 0, MOST_ROWS),
        "keys": keys,
    }


def _key_length(given: list[Tensor], key_length: int | None) -> int:
    """Return K, by the argument or by the first tensor that has a size for each key."""
    if key_length is not None:
        return index("key_length", key_length, 0, MOST_ROWS)
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
    mask_name: str,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> dict[str, Any]:
    if cu_seqlens_q is None or cu_seqlens_k is None:
        missing = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise ValueError(f"{missing} must be given too: packed sequences need both")
    for name, bounds in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        checks.bounds(name, bounds)
    for name, tensor in (("attn_bias", bias), (mask_name, mask)):
        if tensor is not None and tensor.dim() != 3:
            raise ValueError(
                f"{name} must have shape ({{H|Hk|1}}, 1, total_k) or ({{H|Hk|1}}, total_q, "
                f"max_seqlen_k) for packed sequences, got {tuple(tensor.shape)}"
            )
    return {
        "bias": bias,
        "mask": mask,
        "batch": cu_seqlens_q.shape[0] - 1,
        "queries": _longest("max_seqlen_q", max_seqlen_q, cu_seqlens_q),
        "keys": _longest("max_seqlen_k", max_seqlen_k, cu_seqlens_k),
    }


def _longest(name: str, length: int | None, cu_seqlens: Tensor) -> int:
    """Return the length of the longest sequence; by default it is read from the device."""
    if length is not None:
        return index(name, length, 0, MOST_ROWS)
    if cu_seqlens.is_meta:
        raise ValueError(f"{name} must be given with meta tensors, whose values cannot be read")
    if cu_seqlens.numel() < 2:
        return 0
    return max(0, int((cu_seqlens[1:] - cu_seqlens[:-1]).max()))


def _check_mask(name: str, inputs: dict[str, Any], heads: int, kv_heads: int) -> None:
    """Raise ValueError, by the name of this function's argument, for a mask that does not fit."""
    mask, bias = inputs["mask"], inputs["bias"]
    head_sizes = {1, heads, kv_heads}
    if mask.dim() == 4:
        sizes = ({1, inputs["batch"]}, head_sizes, {1, inputs["queries"]}, {1, inputs["keys"]})
        fits = all(size in allowed for size, allowed in zip(mask.shape, sizes, strict=True))
        form = "({B|1}, {H|Hk|1}, {Q|1}, {K|1})"
    else:
        # As far as the shapes tell; what else must fit is in the values of the cu_seqlens.
        same_rows = mask.shape[1] == bias.shape[1]
        fits = mask.shape[0] in head_sizes and (not same_rows or mask.shape[2] == bias.shape[2])
        form = "({H|Hk|1}, 1, total_k) or ({H|Hk|1}, total_q, max_seqlen_k)"
    if not fits:
        raise ValueError(
            f"{name} must have shape {form}, to go with attn_bias of {tuple(bias.shape)}, "
            f"got {tuple(mask.shape)}"
        )
