# SPDX-License-Identifier: BSD-3-Clause
"""Attention with all masks, biases and packings of models."""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from flash_dmattn import checks
from flash_dmattn.interface import flash_dmattn_func, flash_dmattn_varlen_func
from flash_dmattn.masks import IntervalMask
from flash_dmattn.record import DENSE, KeyCounts
from flash_dmattn.selection import (
    call_shape,
    keeps_all,
    key_counts,
    refuse_without_window,
    select,
    without_nan,
    zero_bias,
)
from flash_dmattn.state.chunks import check_heads

from .mask_forms import Mask, check_sizes, has_rows, mask_and_bias
from .packed_documents import (
    Documents,
    bounds_of_sequences,
    documents_of_positions,
    packed_keep,
    select_within_documents,
    sliding_within_sequences,
)
from .peft import fdma_peft_integration_check
from .selected_keys import key_lists

__all__ = ["FlashDynamicMaskAttentionKwargs", "fdma_peft_integration_check"]


class FlashDynamicMaskAttentionKwargs(TypedDict, total=False):
    """The keyword arguments of models for packed sequences."""

    cu_seq_lens_q: Tensor | None
    cu_seq_lens_k: Tensor | None
    max_length_q: int | None
    max_length_k: int | None


def _flash_dynamic_mask_attention_forward(
    query_states: Tensor,
    key_states: Tensor,
    value_states: Tensor,
    attention_mask: Mask,
    attention_bias: Tensor | None,
    query_length: int,
    key_length: int,
    is_causal: bool,
    position_ids: Tensor | None = None,
    softmax_scale: float | None = None,
    window_size: int | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    target_dtype: torch.dtype | None = None,
    implementation: str | None = None,
    *,
    keep_window_size: int | None = None,
    keep_last: int = 0,
    keep_first: int = 0,
    sliding_window: int | None = None,
    sink: Tensor | None = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute attention: the function of this name in 1.2.2, with all combinations of arguments.

    Args:
        query_states: ``(B, Q, H, D)``.
        key_states, value_states: ``(B, K, Hk, D)``; the head dimension of values may be another
            one, Dv.
        attention_mask: see `mask_and_bias`; or an `IntervalMask`.
        attention_bias: added to the scaled scores, without expansion.
        query_length, key_length: Q and K; ignored, because the shapes give them.
        is_causal: query i sees keys ``j <= i + K - Q``, where K is the number of keys in a 2-D
            mask.
        position_ids: ``(B|1, Q)``; without a mask and with Q = K, a position that does not follow
            its predecessor begins another document.
        softmax_scale, softcap, deterministic: as in `flash_dmattn_func`.
        window_size, keep_window_size: keep the keys with the largest bias among visible ones.
        keep_last, keep_first: also keep this many of the last and first keys that a query sees.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: of packed sequences, as in
            `flash_dmattn_varlen_func`. The rows of the batch are concatenated.
        target_dtype: cast float32 inputs to this.
        implementation: the registered name; other kinds of attention are refused.
        sliding_window: keep only the nearest keys, this many on each visible side.
        sink: as in `flash_dmattn_func`.
        indices: int ``(B, {Hk|1}, Q, k)``, the only keys that queries see among those that the mask
            keeps; entries out of range are ignored.
        **kwargs: arguments of other attention implementations, ignored.

    Returns:
        ``(B, Q, H, Dv)``.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `flash_dmattn_func`.
    """
    if implementation is not None and "dmattn" not in str(implementation):
        raise ValueError(
            "implementation must be None or 'flash_dmattn', got "
            f"{checks.described(implementation)}, which is another kind of attention"
        )
    states = {"query_states": query_states, "key_states": key_states, "value_states": value_states}
    for name, tensor in states.items():
        check_heads(name, tensor)
    query, key, value, attention_bias = fdma_peft_integration_check(
        query_states, key_states, value_states, attention_bias, target_dtype
    )
    window, counts = _window(window_size, keep_window_size), None
    if window is None:
        refuse_without_window(keep_last, keep_first)
    else:
        counts = key_counts(window, keep_last, keep_first)
    if sliding_window is not None:
        sliding_window = checks.index("sliding_window", sliding_window, 1)
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "deterministic": deterministic,
        "sink": sink,
    }
    mask, bias, keys = mask_and_bias(attention_mask, attention_bias, key.shape[1], query.dtype)
    if keys != key.shape[1]:
        key, value = key[:, :keys], value[:, :keys]
    check_sizes(mask, bias, query, key)
    if indices is not None and counts is not None:
        raise ValueError("window_size cannot be combined with keys that the model itself selects")
    if (
        counts is not None
        and bias is None
        and not (counts.window == 0 and counts.keeps_first_or_last)
    ):
        raise ValueError(
            "window_size must be None where attention_bias is None, since it selects the keys with "
            "the largest bias, or 0 with keep_last or keep_first, which keep the nearest and the "
            f"first keys; got {counts.window}"
        )
    _check_tensors(
        position_ids=position_ids, cu_seq_lens_q=cu_seq_lens_q, cu_seq_lens_k=cu_seq_lens_k
    )
    for name, bounds, other in (
        ("cu_seq_lens_q", cu_seq_lens_q, cu_seq_lens_k),
        ("cu_seq_lens_k", cu_seq_lens_k, cu_seq_lens_q),
    ):
        if bounds is None and other is not None:
            raise ValueError(f"{name} must be given too, got None: packed sequences need both")
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        packing = Packing(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        if isinstance(mask, Documents):  # the same sequences, found by their positions
            mask = None
        by_row = has_rows(mask) or has_rows(bias) or isinstance(mask, IntervalMask)
        size = None if _depends_on_queries(mask) else sliding_window
        if size is not None and _longest(packing, key.shape[0] * keys, is_causal) <= size:
            size = None  # no sequence is longer than the window
        by_row = by_row or (size is not None and counts is not None)
        if not by_row and indices is None:
            return _varlen(query, key, value, mask, bias, packing, is_causal, counts, size, options)
        mask, is_causal = _within_sequences(mask, query, key, packing, size, is_causal), False
    elif (
        mask is None and position_ids is not None and _may_hold_documents(position_ids, query, key)
    ):
        mask = documents_of_positions(position_ids)
    if sliding_window is not None and sliding_window < keys and not _depends_on_queries(mask):
        mask = _sliding(mask, sliding_window, query.shape[1], keys, query.device, is_causal)
    if indices is not None:
        lists = key_lists(indices, mask, bias, query, key)._asdict()
        out = flash_dmattn_func(query, key, value, is_causal=is_causal, **lists, **options)
        assert isinstance(out, Tensor)
        return out
    if counts is not None and keeps_all(counts, keys):
        bias, counts = None if bias is None else without_nan(bias), None
    return _dense(query, key, value, mask, bias, is_causal, counts, options)


def _check_tensors(**tensors: Any) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            checks.tensor(name, tensor)


class Packing(NamedTuple):
    """Where the sequences of a batch begin and end."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    longest_q: int | None
    longest_k: int | None


def _window(window_size: int | None, keep_window_size: int | None) -> int | None:
    for name, size in (("window_size", window_size), ("keep_window_size", keep_window_size)):
        if size is not None:
            checks.index(name, size, 0)
    if window_size is None or keep_window_size is None:
        return keep_window_size if window_size is None else window_size
    if window_size != keep_window_size:
        raise ValueError(
            "keep_window_size is another name of window_size; got "
            f"keep_window_size={keep_window_size} and window_size={window_size}"
        )
    return window_size


def _may_hold_documents(position_ids: Tensor, query: Tensor, key: Tensor) -> bool:
    """Say by the shapes whether positions may indicate packed documents.

    With a cache, queries do not correspond to keys. Positions of images have more dimensions.
    """
    batch, queries = query.shape[:2]
    return (
        1 < queries == key.shape[1]
        and position_ids.dim() == 2
        and position_ids.shape[1] == queries
        and checks.is_one_of(position_ids.shape[0], 1, batch)
    )


def _depends_on_queries(mask: Mask) -> bool:
    """Say whether a mask depends on queries, as a sliding window does."""
    return isinstance(mask, IntervalMask) or has_rows(mask)


def _sliding(
    mask: Mask, size: int, queries: int, keys: int, device: torch.device, is_causal: bool
) -> IntervalMask:
    right = 0 if is_causal else size - 1
    near = IntervalMask.sliding_window(size - 1, right, queries, keys, device=device)
    if isinstance(mask, Documents):
        return mask.intervals() & near
    if isinstance(mask, Tensor):
        end = (mask[:, :, 0] * queries).to(torch.int32).expand(-1, -1, keys)
        return IntervalMask(torch.zeros_like(end), end) & near
    return near


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    bias: Tensor | None,
    is_causal: bool,
    counts: KeyCounts | None,
    options: dict[str, Any],
) -> Tensor:
    if isinstance(mask, Documents):
        if counts is None:
            mask = mask.intervals()
        elif bias is None or has_rows(bias) or counts.keeps_first_or_last:
            mask = mask.intervals().to_bool(query.shape[1])
        else:
            mask = select_within_documents(bias, counts.window, mask, is_causal=is_causal)
            counts = None
    elif isinstance(mask, IntervalMask) and counts is not None:
        mask = mask.to_bool(query.shape[1])
    if counts is not None and counts.keeps_first_or_last and not is_causal and has_rows(mask):
        # Last and first are relative to the keys that the mask lets each query see.
        assert isinstance(mask, Tensor)
        shape = call_shape(query, key, DENSE)
        ranking = zero_bias(key, DENSE) if bias is None else bias
        mask, counts = select(ranking, mask, DENSE, shape, counts, False, "auto").mask, None
    options = {**options, **_window_options(counts)}
    out = flash_dmattn_func(query, key, value, mask, bias, is_causal=is_causal, **options)
    assert isinstance(out, Tensor)
    return out


def _window_options(counts: KeyCounts | None) -> dict[str, Any]:
    if counts is None:
        return {}
    names = ("window_size", "keep_last", "keep_first")
    return dict(zip(names, counts, strict=True))


def _longest(packing: Packing, tokens: int, is_causal: bool) -> int:
    """Return a bound of the distances in packed sequences, whose rows are aligned at their ends."""
    lengths = packing[3:] if is_causal else packing[2:]
    return max(length if isinstance(length, int) else tokens for length in lengths)


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    bias: Tensor | None,
    packing: Packing,
    is_causal: bool,
    counts: KeyCounts | None,
    sliding_window: int | None,
    options: dict[str, Any],
) -> Tensor:
    batch, keys = key.shape[:2]
    cu_seqlens_q, cu_seqlens_k, longest_q, longest_k = packing
    assert mask is None or isinstance(mask, Tensor)
    packed_mask: Tensor | IntervalMask | None = _along_sequences(mask, batch, keys)
    options = {**options, **_window_options(counts)}
    is_training = (
        torch.is_grad_enabled() and query.requires_grad and query.shape[:2] == key.shape[:2]
    )
    bounds = bounds_of_sequences(cu_seqlens_q, cu_seqlens_k, compare=is_training)
    if sliding_window is not None:
        assert packed_mask is None or isinstance(packed_mask, Tensor)
        packed_mask = sliding_within_sequences(
            *bounds, sliding_window, packed_mask, batch * keys, is_causal=is_causal
        )
    out = flash_dmattn_varlen_func(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        *bounds,
        checks.read_max_seqlen("cu_seq_lens_q", cu_seqlens_q) if longest_q is None else longest_q,
        checks.read_max_seqlen("cu_seq_lens_k", cu_seqlens_k) if longest_k is None else longest_k,
        is_causal=is_causal,
        attn_mask=packed_mask,
        attn_bias=_along_sequences(bias, batch, keys),
        **options,
    )
    assert isinstance(out, Tensor)
    return out.view(*query.shape[:-1], value.shape[-1])


def _along_sequences(tensor: Tensor | None, batch: int, keys: int) -> Tensor | None:
    """Convert ``({B|1}, h, 1, {K|1})`` to ``(h, 1, B * K)``."""
    if tensor is None:
        return None
    return tensor.expand(batch, -1, -1, keys).permute(1, 2, 0, 3).flatten(2)


def _within_sequences(
    mask: Mask,
    query: Tensor,
    key: Tensor,
    packing: Packing,
    sliding_window: int | None,
    is_causal: bool,
) -> Tensor:
    """Return bool ``(B, h, Q, K)``: a mask limited to each query's own sequence."""
    (batch, queries), keys = query.shape[:2], key.shape[1]
    sizes = batch, queries, keys
    in_sequence = packed_keep(
        *packing[:2], *sizes, is_causal=is_causal, sliding_window=sliding_window
    )
    if isinstance(mask, IntervalMask):
        return in_sequence & mask.to_bool(queries)
    return in_sequence & mask if isinstance(mask, Tensor) else in_sequence
