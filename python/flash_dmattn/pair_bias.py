# SPDX-License-Identifier: BSD-3-Clause
"""Attention with two batch dimensions. Masks and biases may be shared along either of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from . import checks
from .arguments import check_tensors, scale_of, without_expansion
from .bias_columns import with_bias_columns
from .checks import flag
from .interface import flash_dmattn_func
from .wrong_keywords import hide_unknown_keywords, refuse_keywords

__all__ = ["pair_bias_attention"]


class _Sizes(NamedTuple):
    outer: int  # B
    inner: int  # N
    queries: int
    keys: int
    heads: int
    kv_heads: int


@hide_unknown_keywords
def pair_bias_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool | None = None,
    *,
    softcap: float | None = None,
    sink: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `flash_dmattn_func` for each element of two batch dimensions.

    Masks and biases may have one, both or none of these dimensions; nothing is expanded. So one
    pair bias, ``(B, 1, H, S, S)``, serves the N rows of a batch element, as in AlphaFold's
    attention, and one window mask, ``(1, N, 1, S, S)``, serves all images of a batch, as in Swin.
    The gradient of a bias has the bias's shape, summed in float32 over the shared dimensions.

    If B > 1 and one tensor has only one of the two dimensions, there is one call for each element
    of the shorter dimension.

    Args:
        query: ``(B, N, Q, H, D)``.
        key, value: ``(B, N, K, Hk, D)``; the head dimension of value may be another one, Dv.
        attn_mask: bool ``({B|1}, {N|1}, {H|Hk|1}, {Q|1}, {K|1})``, True keeps.
        attn_bias: shape as ``attn_mask``, query's dtype or float32; added to the scaled scores.
        key_bias: ``({B|1}, {N|1}, {Hk|1}, 1, {K|1})``, any floating dtype: a per-key bias in
            addition to a per-query ``attn_bias``. It goes through the product of query and key, as
            three more 16-bit columns, or one in float32: D is then at most 253, or 255, the scale
            must not be 0, and its gradient is rounded like that of ``key``. Keys of -inf are
            dropped by ``attn_mask``, which then has the batch dimensions of both.
        softmax_scale, is_causal, softcap, sink, deterministic, return_lse, backend: as in
            `flash_dmattn_func`. softcap is not supported with ``key_bias`` and a per-query
            ``attn_bias``.

    Returns:
        ``(B, N, Q, H, Dv)``, and with return_lse the log-sum-exp ``(B, N, H, Q)``.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `flash_dmattn_func`.
    """
    if unknown:
        refuse_keywords(pair_bias_attention, unknown)
    return_lse = flag("return_lse", return_lse)
    others = {"attn_mask": attn_mask, "attn_bias": attn_bias, "key_bias": key_bias, "sink": sink}
    check_tensors(query, key=key, value=value, **others)
    sizes = _sizes(query, key, value)
    for name, tensor in (("attn_mask", attn_mask), ("attn_bias", attn_bias)):
        if tensor is not None:
            _check_shape(name, tensor, sizes, sizes.queries)
    head_dim, value_dim, scale = query.shape[-1], value.shape[-1], scale_of(softmax_scale, query)
    if key_bias is not None:
        _check_dtypes(key_bias, attn_mask)
        _check_shape("key_bias", key_bias, sizes, 1)
        if attn_bias is None or attn_bias.shape[3] == 1:
            attn_bias = _add_biases(attn_bias, key_bias)
        else:
            _check_columns(scale, softcap)
            whole = key.dtype == torch.promote_types(key_bias.dtype, torch.float32)
            maximum = 255 if whole else 253
            if head_dim > maximum:
                raise ValueError(
                    f"query has head dimension {head_dim}, but it must be at most {maximum} with "
                    "key_bias and a per-query attn_bias, which add columns to query and key"
                )
            # The mask must drop keys of -inf, so that their contents affect no result.
            kept = key_bias != -torch.inf
            if attn_mask is None:
                attn_mask = kept
            else:
                one, other = _with_equal_heads(attn_mask, kept)
                attn_mask = one & other
            columns = torch.where(kept, key_bias, 0).squeeze(3).transpose(2, 3)
            query, key, value = with_bias_columns(query, key, value, columns, scale)
    attn_mask, attn_bias = without_expansion(attn_mask, 2), without_expansion(attn_bias, 2)
    options: dict[str, Any] = {
        "softmax_scale": scale,
        "is_causal": is_causal,
        "softcap": softcap,
        "sink": sink,
        "deterministic": deterministic,
        "return_lse": True,
        "backend": backend,
    }

    def attend(*tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = flash_dmattn_func(*tensors, **options)  # type: ignore[arg-type]
        return out, lse

    out, lse = _loop_over_batch(attend, (query, key, value), (attn_mask, attn_bias), sizes)
    out = out if out.shape[-1] == value_dim else out[..., :value_dim]
    return (out, lse) if return_lse else out


def _check_dtypes(key_bias: Tensor, attn_mask: Tensor | None) -> None:
    """Raise TypeError unless these can be combined."""
    if not key_bias.is_floating_point() or key_bias.element_size() < 2:
        raise TypeError(
            f"key_bias must have a floating-point dtype of at least 16 bits, got {key_bias.dtype}"
        )
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        raise TypeError(f"attn_mask must have dtype torch.bool (True keeps), got {attn_mask.dtype}")


def _sizes(query: Tensor, key: Tensor, value: Tensor) -> _Sizes:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 5:
            raise ValueError(
                f"{name} must have shape (B, N, rows, heads, D), got {tuple(tensor.shape)}"
            )
    outer, inner, queries, heads, _ = query.shape
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape[:2] != query.shape[:2]:
            raise ValueError(
                f"{name} must have the batch {(outer, inner)} of query, got {tuple(tensor.shape)}"
            )
    return _Sizes(outer, inner, queries, key.shape[2], heads, key.shape[3])


def _check_shape(name: str, tensor: Tensor, sizes: _Sizes, rows: int) -> None:
    heads = {1, sizes.kv_heads} if name == "key_bias" else {1, sizes.kv_heads, sizes.heads}
    allowed = ({1, sizes.outer}, {1, sizes.inner}, heads, {1, rows}, {1, sizes.keys})
    if tensor.dim() == 5 and all(
        n in sizes_of_dim for n, sizes_of_dim in zip(tensor.shape, allowed, strict=True)
    ):
        return
    choices = ("|".join(map(str, sorted(sizes_of_dim, reverse=True))) for sizes_of_dim in allowed)
    wanted = ", ".join(f"{{{choice}}}" if "|" in choice else choice for choice in choices)
    raise ValueError(f"{name} must have shape ({wanted}), got {tuple(tensor.shape)}")


def _check_columns(scale: float, softcap: float | None) -> None:
    """Raise unless the product of query and key can also carry a per-key bias."""
    if softcap:
        raise NotImplementedError(
            "softcap must be 0 or None with key_bias and an attn_bias for each query, got "
            f"{softcap}"
        )
    if scale == 0:
        raise ValueError(
            "softmax_scale must not be 0 with key_bias and an attn_bias for each query"
        )


def _add_biases(bias: Tensor | None, key_bias: Tensor) -> Tensor:
    """Return the float32 sum of a bias that is the same for every query and a per-key bias."""
    key_bias = key_bias.to(torch.float32)
    if bias is None:
        return key_bias
    one, other = _with_equal_heads(bias.to(torch.float32), key_bias)
    return one + other


def _with_equal_heads(*tensors: Tensor) -> list[Tensor]:
    """Repeat entries per KV head for the query heads of the group, if head counts differ."""
    heads = max(t.shape[2] for t in tensors)
    return [
        t if checks.is_one_of(t.shape[2], 1, heads) else t.repeat_interleave(heads // t.shape[2], 2)
        for t in tensors
    ]


def _loop_over_batch(
    attend: Callable[..., tuple[Tensor, Tensor]],
    tensors: tuple[Tensor, Tensor, Tensor],
    shared: tuple[Tensor | None, ...],
    sizes: _Sizes,
) -> tuple[Tensor, Tensor]:
    """Call attention of one batch dimension once, or once per element if sharing requires it."""
    batch = (sizes.outer, sizes.inner)
    if 0 in batch:
        shared = tuple(None if t is None else t.expand(*batch, *t.shape[2:]) for t in shared)
    if not any(t is not None and _is_mixed(t, batch) for t in shared):
        out, lse = attend(
            *(t.flatten(0, 1) for t in tensors),
            *(None if t is None else t.flatten(0, 1) for t in shared),
        )
        return torch.unflatten(out, 0, batch), torch.unflatten(lse, 0, batch)
    dim = 0 if sizes.outer <= sizes.inner else 1
    masks_and_biases = [None if t is None else _summed_in_float32(t, dim) for t in shared]
    results = [
        attend(
            *(t.select(dim, n) for t in tensors),
            *(
                None if t is None else t.select(dim, n if t.shape[dim] > 1 else 0)
                for t in masks_and_biases
            ),
        )
        for n in range(batch[dim])
    ]
    outs, lses = zip(*results, strict=True)
    return torch.stack(outs, dim), torch.stack(lses, dim)


def _is_mixed(tensor: Tensor, batch: tuple[int, int]) -> bool:
    """Say whether a tensor has exactly one of the batch dimensions and shares the other."""
    batch_shape = tuple(tensor.shape[:2])
    return batch_shape != batch and batch_shape != (1, 1)


def _summed_in_float32(tensor: Tensor, dim: int) -> Tensor:
    """Return a tensor whose gradients from several calls are summed in float32."""
    if tensor.dtype == torch.bool or tensor.shape[dim] > 1 or not tensor.requires_grad:
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
