# SPDX-License-Identifier: BSD-3-Clause
"""Conversion of callers' masks and biases to the forms that attention takes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_dmattn import checks
from flash_dmattn.arguments import is_block_mask
from flash_dmattn.checks import is_one_of
from flash_dmattn.masks import IntervalMask

from .packed_documents import Documents

__all__ = [
    "Mask",
    "MaskAndBias",
    "check_sizes",
    "checked_bias",
    "has_rows",
    "mask_and_bias",
    "sum_of_biases",
]

Mask = Tensor | IntervalMask | Documents | None


class MaskAndBias(NamedTuple):
    """The mask, the bias, and the number of keys."""

    mask: Mask  # a tensor is bool and 4-D
    bias: Tensor | None  # 4-D, not expanded
    keys: int  # of a cache, the written ones


def mask_and_bias(
    attention_mask: Mask, attention_bias: Tensor | None, keys: int, dtype: torch.dtype
) -> MaskAndBias:
    """Separate masks from biases.

    Args:
        attention_mask: 2-D: ``(B, keys written)``, nonzero for tokens, of any dtype. 3-D or 4-D:
            bool or integer, nonzero keeps; or floating, added to the scores, where values below
            half the lowest number of the dtype drop keys.
        attention_bias: ``(B, K)``, ``(B, {H|Hk|1}, K)`` or 4-D.
        keys: number of keys in key and value.
        dtype: query's.

    Raises:
        TypeError: attention_bias is not a tensor of real numbers, or the mask is none.
        ValueError: a tensor has another number of dimensions.
    """
    is_made = attention_mask is None or isinstance(attention_mask, (IntervalMask, Documents))
    if not (is_made or is_block_mask(attention_mask)):
        checks.tensor("attention_mask", attention_mask, "a torch.Tensor, an IntervalMask or None")
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        # If a cache has spare room, the mask shows how far it is written. If a sliding window has
        # cut a cache, the mask has more keys than are left.
        batch, mask_length = attention_mask.shape
        padding = attention_mask if mask_length <= keys else attention_mask[:, mask_length - keys :]
        keys = min(mask_length, keys)
        bias = _fit_bias(attention_bias, keys, dtype)
        return MaskAndBias(_to_bool(padding).view(batch, 1, 1, keys), bias, keys)
    bias = _fit_bias(attention_bias, keys, dtype)
    if not isinstance(attention_mask, Tensor):
        return MaskAndBias(attention_mask, bias, keys)
    mask = _cut_to(keys, _to_4d("attention_mask", attention_mask))
    if not mask.is_floating_point():
        return MaskAndBias(_to_bool(mask), bias, keys)
    kept = mask > torch.finfo(mask.dtype).min / 2
    added = _fit_bias(mask, keys, dtype)
    assert added is not None
    if bias is not None:
        added = _add_biases("attention_bias", bias, "attention_mask", added)
    return MaskAndBias(kept, added, keys)


def sum_of_biases(**biases: Tensor | None) -> Tensor | None:
    """Add what is there of two biases, in any of the forms that `mask_and_bias` takes one in.

    Raises:
        TypeError: a bias is not a tensor of real numbers.
        ValueError: a bias has another number of dimensions, or they do not broadcast.
    """
    present = {name: bias for name, bias in biases.items() if bias is not None}
    if len(present) < 2:
        return next(iter(present.values()), None)
    (name, bias), (other, added) = (
        (name, checked_bias(name, bias)) for name, bias in present.items()
    )
    return _add_biases(name, bias, other, added)


def check_sizes(mask: Mask, bias: Tensor | None, query: Tensor, key: Tensor) -> None:
    """Raise ValueError unless the results of `mask_and_bias` broadcast to a call.

    Args:
        mask, bias: of `mask_and_bias`.
        query: ``(B, Q, H, D)``.
        key: ``(B, K, Hk, D)``.
    """
    (batch, queries, heads), (keys, kv_heads) = query.shape[:3], key.shape[1:3]
    allowed = ((batch,), (heads, kv_heads), (queries,), (keys,))
    if isinstance(mask, IntervalMask):
        if mask.start.dim() != 3:
            raise ValueError(
                "attention_mask must be an IntervalMask of shape ({B|1}, {H|Hk|1}, K), got "
                f"{tuple(mask.start.shape)}, the form for packed sequences"
            )
        mask = mask.start.unsqueeze(2)
    for name, tensor in (("attention_mask", mask), ("attention_bias", bias)):
        if not isinstance(tensor, Tensor):
            continue
        sizes = zip(tensor.shape, allowed, strict=True)
        if not all(is_one_of(size, 1, *others) for size, others in sizes):
            raise ValueError(
                f"{name} must have shape ({{B|1}}, {{H|Hk|1}}, {{Q|1}}, {{K|1}}) with B={batch}, "
                f"H={heads}, Hk={kv_heads}, Q={queries}, K={keys}, in four dimensions, got "
                f"{tuple(tensor.shape)}"
            )
        checks.same_device(name, tensor, "query's device", query.device)


def has_rows(tensor: Mask) -> bool:
    """Say whether a 4-D mask or bias has a row for each query."""
    return isinstance(tensor, Tensor) and tensor.shape[-2] != 1


def _to_bool(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask != 0


def _fit_bias(bias: Tensor | None, keys: int, dtype: torch.dtype) -> Tensor | None:
    """Return a bias for these keys, in query's dtype or float32."""
    if bias is None:
        return None
    bias = _cut_to(keys, checked_bias("attention_bias", bias))
    return bias if bias.dtype in (dtype, torch.float32) else bias.to(torch.float32)


def checked_bias(name: str, bias: Tensor) -> Tensor:
    """Return a bias in four dimensions."""
    if checks.tensor(name, bias).dtype == torch.bool or bias.is_complex():
        raise TypeError(f"{name} must hold real numbers, got {bias.dtype}")
    return _to_4d(name, bias)


def _to_4d(name: str, tensor: Tensor) -> Tensor:
    if tensor.dim() == 4:
        return tensor
    if tensor.dim() not in (2, 3):
        raise ValueError(
            f"{name} must have two, three or four dimensions, got shape {tuple(tensor.shape)}"
        )
    return tensor[:, None, None] if tensor.dim() == 2 else tensor.unsqueeze(2)


def _cut_to(keys: int, tensor: Tensor) -> Tensor:
    """Cut off columns beyond the keys, without a slice if there are none."""
    return tensor if tensor.shape[-1] <= keys else tensor[..., :keys]


def _add_biases(name: str, bias: Tensor, other: str, added: Tensor) -> Tensor:
    """Add two biases; of two head counts the smaller one is that of the KV heads."""
    fewer, heads = min(bias.shape[1], added.shape[1]), max(bias.shape[1], added.shape[1])
    others = [(bias.shape[i], added.shape[i]) for i in (0, 2, 3)]
    fit = all(one == two or is_one_of(1, one, two) for one, two in others)
    if fewer == 0 or heads % fewer or not fit:
        raise ValueError(
            f"{other} must have the shape of {name}, {tuple(bias.shape)}, to which it is added, or "
            f"sizes of 1, and a number of heads of {{H|Hk|1}}, got {tuple(added.shape)}"
        )
    checks.same_device(other, added, f"{name}'s device", bias.device)
    bias, added = (
        t if is_one_of(t.shape[1], 1, heads) else t.repeat_interleave(heads // t.shape[1], 1)
        for t in (bias, added)
    )
    return bias + added
