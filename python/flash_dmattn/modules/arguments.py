# SPDX-License-Identifier: BSD-3-Clause
"""Checks of the arguments of layers and of their calls."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import checks
from ..arguments import autocast_dtype, backend_name
from ..backends import check_backend_name
from ..mask_checks import check_token_mask
from ..masks import IntervalMask

__all__ = [
    "check_backend",
    "check_bias_form",
    "check_cu_seqlens",
    "check_fits_projection",
    "check_keys",
    "check_padding",
    "check_parameter_dtype",
    "check_positions",
    "check_positive",
    "check_tokens",
    "checked_base",
    "checked_heads",
    "finite",
]

_BIAS_FORMS = ("softplus", "exp")


def check_positive(**sizes: int) -> None:
    """Raise unless the sizes are integers above 0."""
    for name, size in sizes.items():
        checks.index(name, size, 1, checks.MAX_ROWS)


def checked_heads(
    embed_dim: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None
) -> tuple[int, int]:
    """Return Hk and D of a layer of H heads."""
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    check_positive(embed_dim=embed_dim, num_heads=num_heads, num_kv_heads=kv_heads)
    if num_heads % kv_heads:
        raise ValueError(
            f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {kv_heads}"
        )
    if head_dim is None:
        if embed_dim % num_heads:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads unless head_dim is given, got "
                f"{embed_dim} and {num_heads}"
            )
        head_dim = embed_dim // num_heads
    check_positive(head_dim=head_dim)
    if head_dim > 256:
        raise ValueError(f"head_dim must be at most 256, got {checks.described(head_dim)}")
    return kv_heads, head_dim


def finite(name: str, value: float, minimum: float = -math.inf) -> float:
    """Return a number that is neither infinite nor NaN."""
    checked = checks.number(name, value, "")
    if not (math.isfinite(checked) and checked >= minimum):
        wanted = "" if minimum == -math.inf else f" and at least {minimum}"
        raise ValueError(f"{name} must be finite{wanted}, got {checked}")
    return checked


def checked_base(rotary_base: float, head_dim: int) -> float:
    """Check and return the base of the rotary embedding, which rotates pairs of elements."""
    base = finite("rotary_base", rotary_base)
    if head_dim % 2 or base <= 0:
        raise ValueError(
            "rotary_base must be positive and head_dim even, or rotary_base None, got "
            f"rotary_base={rotary_base} and head_dim={head_dim}"
        )
    return base


def check_bias_form(bias_form: str) -> None:
    """Raise ValueError unless the form exists."""
    if not isinstance(bias_form, str) or bias_form not in _BIAS_FORMS:
        raise ValueError(
            f"bias_form must be one of {', '.join(_BIAS_FORMS)}, got {checks.described(bias_form)}"
        )


def check_backend(backend: str | None) -> None:
    """Raise unless it is the name of a backend. Whether it can run is checked in a call."""
    name = backend_name(backend)
    if name != "auto":
        check_backend_name(name)


def check_parameter_dtype(dtype: torch.dtype | None) -> None:
    """Raise TypeError unless parameters of this dtype are trainable."""
    if dtype is None:
        return
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        raise TypeError(
            "dtype must be a floating-point torch.dtype of at least 16 bits, or None, got "
            f"{checks.described(dtype)}"
        )


def check_fits_projection(hidden_states: Tensor, weight: Tensor) -> None:
    """Raise unless a weight can multiply the input."""
    if hidden_states.device != weight.device:
        raise ValueError(
            f"hidden_states must be on {weight.device}, as the layer's parameters, got a tensor on "
            f"{hidden_states.device}"
        )
    if hidden_states.dtype != weight.dtype and (
        autocast_dtype(hidden_states) is None or not hidden_states.is_floating_point()
    ):
        raise TypeError(
            f"hidden_states must have dtype {weight.dtype}, as the layer's parameters, got "
            f"{hidden_states.dtype}; convert one of them, or call under torch.autocast"
        )


def check_cu_seqlens(cu_seqlens: Tensor, hidden_states: Tensor) -> Tensor:
    """Check the form of packed bounds, and return them; their values are checked later."""
    checks.cu_seqlens("cu_seqlens", cu_seqlens)
    checks.same_device("cu_seqlens", cu_seqlens, "hidden_states' device", hidden_states.device)
    return cu_seqlens


def check_keys(attn_mask: Tensor | IntervalMask, tokens: int, cached: int) -> None:
    """Raise ValueError unless a mask has all keys. Attention would broadcast a single key."""
    mask = attn_mask.start if isinstance(attn_mask, IntervalMask) else attn_mask
    if mask.dim() and mask.shape[-1] == cached + tokens:
        return
    held = f" after the {cached} that cache holds" if cached else ""
    raise ValueError(
        f"attn_mask must have all {cached + tokens} keys in its last dimension, here those of "
        f"{tokens} tokens{held}, got shape {tuple(mask.shape)}"
    )


def check_padding(padding: Tensor, hidden_states: Tensor, cu_seqlens: Tensor | None) -> None:
    """Raise unless padding has a boolean for each token."""
    check_token_mask(padding, cu_seqlens)
    rows = tuple(hidden_states.shape[:-1])
    if tuple(padding.shape) != rows:
        raise ValueError(
            f"padding must have shape {rows}, of the tokens of this call, got "
            f"{tuple(padding.shape)}"
        )
    checks.same_device("padding", padding, "hidden_states' device", hidden_states.device)


def check_positions(position_ids: Tensor, hidden_states: Tensor) -> None:
    """Raise unless position_ids has an integer for each token."""
    rows = tuple(hidden_states.shape[:-1])
    checks.tensor("position_ids", position_ids, "a torch.Tensor of integers or None")
    if position_ids.dtype not in checks.INTEGERS:
        raise TypeError(f"position_ids must hold integers, got {position_ids.dtype}")
    shape = tuple(position_ids.shape)
    if shape != rows and shape != rows[-1:]:
        allowed = " or ".join(str(shape) for shape in dict.fromkeys((rows[-1:], rows)))
        raise ValueError(f"position_ids must have shape {allowed}, got {shape}")
    checks.same_device("position_ids", position_ids, "hidden_states' device", hidden_states.device)


def check_tokens(tokens: dict[str, Tensor]) -> None:
    """Raise unless the key, value and bias of new tokens of a cache fit each other."""
    for name, tensor in tokens.items():
        if checks.tensor(name, tensor).dtype not in checks.FLOATS:
            raise TypeError(f"{name} must be of 16 to 64 floating-point bits, got {tensor.dtype}")
    key = tokens["key"]
    if key.dim() != 4:
        raise ValueError(f"key must have shape (B, N, Hk, D), got {tuple(key.shape)}")
    batch, added, heads, _ = key.shape
    for name in ("value", "bias"):
        tensor = tokens[name]
        wanted, got = tuple(key.shape), tuple(tensor.shape)
        if name == "bias":
            # A layer's own key_bias may have a different number of heads.
            wanted = (batch, got[1] if len(got) == 4 else heads, 1, added)
        if got != wanted:
            raise ValueError(f"{name} must have shape {wanted} to go with key, got {got}")
        checks.same_device(name, tensor, "key's device", key.device)
