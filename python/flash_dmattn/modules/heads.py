# SPDX-License-Identifier: BSD-3-Clause
"""The norm and the rotation of query and key heads, between projections and attention."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from .. import dispatch_state
from ..state.stepping import has_kernel
from .fusing import is_unmodified
from .parts import eps_of
from .rotary import packed_positions, rotary_factors, rotate

__all__ = ["normalize_and_rotate"]

# Dtypes that the kernels support; they compute in float32.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class _Layer(Protocol):
    q_norm: nn.RMSNorm | None
    k_norm: nn.RMSNorm | None
    rotary_base: float | None


class _Positions(Protocol):
    """A cache that knows the number of tokens seen."""

    def positions(self, count: int, device: torch.device) -> Tensor: ...


def normalize_and_rotate(
    layer: _Layer,
    query: Tensor,
    key: Tensor,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    cache: _Positions | None,
) -> tuple[Tensor, Tensor]:
    """Return query and key ``(..., N, heads, D)``, normalized and rotated.

    Args:
        layer: its norms and rotary base are used.
        query, key: of the projections.
        position_ids, cu_seqlens, cache: as in `DynamicMaskAttention.forward`.
    """
    factors = None
    if layer.rotary_base is not None:
        if position_ids is None:
            position_ids = _positions(query, cu_seqlens, cache)
        compute_dtype = torch.promote_types(query.dtype, torch.float32)
        factors = rotary_factors(position_ids, query.shape[-1], layer.rotary_base, compute_dtype)
    return _normalize_and_rotate(query, layer.q_norm, factors), _normalize_and_rotate(
        key, layer.k_norm, factors
    )


def _normalize_and_rotate(
    heads: Tensor, norm: nn.RMSNorm | None, factors: tuple[Tensor, Tensor] | None
) -> Tensor:
    if norm is None and factors is None:
        return heads
    if _has_fused_kernel(heads, norm):
        from .fused_heads import norm_and_rotate

        if norm is None:
            return norm_and_rotate(heads, None, 0.0, factors)
        return norm_and_rotate(heads, norm.weight, eps_of(norm), factors)
    heads = _normalize(heads, norm)
    return heads if factors is None else rotate(heads, *factors)


def _has_fused_kernel(heads: Tensor, norm: nn.RMSNorm | None) -> bool:
    """Say whether kernels compute the norm and the rotation.

    They do not if torch observes single operations, with the exception of profilers: these must see
    what runs without them.
    """
    if not has_kernel(heads.device.type) or heads.dtype not in _DTYPES or not heads.numel():
        return False
    if norm is None:
        weight = None
    elif is_unmodified(norm, nn.RMSNorm) and norm.weight is not None and norm.eps is not None:
        # torch's default epsilon depends on its version, so it must be given.
        weight = norm.weight
        if weight.dtype not in (heads.dtype, torch.float32) or weight.shape != heads.shape[-1:]:
            return False
        if weight.device != heads.device or not weight.is_contiguous():
            return False
    else:
        return False
    return _has_constant_token_stride(heads) and dispatch_state.is_idle(
        (heads, weight), or_profiled=True
    )


def _has_constant_token_stride(heads: Tensor) -> bool:
    """Say whether each token's heads are contiguous, and tokens are at a constant distance."""
    *sizes, tokens, count, dim = heads.shape
    *strides, token, head, element = heads.stride()
    if element != 1 or (head != dim and count > 1):
        return False
    return not sizes or sizes[0] == 1 or strides[0] == tokens * token


def _normalize(heads: Tensor, norm: nn.RMSNorm | None) -> Tensor:
    if norm is None:
        return heads
    # Under autocast the dtypes of heads and weight differ. Another kind of norm may have no weight.
    weight = getattr(norm, "weight", None)
    normalized: Tensor = norm(heads if weight is None else heads.to(weight.dtype))
    return normalized.to(heads.dtype)


def _positions(query: Tensor, cu_seqlens: Tensor | None, cache: _Positions | None) -> Tensor:
    rows, device = query.shape[-3], query.device
    if cu_seqlens is not None:
        return packed_positions(cu_seqlens, rows)
    if cache is not None:
        return cache.positions(rows, device)
    return torch.arange(rows, device=device)
