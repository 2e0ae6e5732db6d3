# SPDX-License-Identifier: BSD-3-Clause
"""What is done with the heads of queries and keys between their projections and attention."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from ..state.stepping import has_kernel
from .cache import AttentionCache
from .rotary import packed_positions, rotary_factors, rotate

__all__ = ["prepared"]


class _Layer(Protocol):
    q_norm: nn.RMSNorm | None
    k_norm: nn.RMSNorm | None
    rotary_base: float | None


def prepared(
    layer: _Layer,
    query: Tensor,
    key: Tensor,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    cache: AttentionCache | None,
) -> tuple[Tensor, Tensor]:
    """Return query and key ``(..., N, heads, D)`` normalised and rotated.

    Args:
        layer: whose norms and rotary base are used.
        query, key: of the projections.
        position_ids, cu_seqlens, cache: as in `DynamicMaskAttention.forward`.
    """
    start = None if cache is None or cache.kept is None else cache.kept.counter
    if start is not None and position_ids is None and _fits_kernel(layer, query, key):
        from .heads_kernel import start_kernel

        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = layer.q_norm, layer.k_norm
        return start_kernel(query, key, norms, layer.rotary_base, start)
    query, key = _normalized(query, layer.q_norm), _normalized(key, layer.k_norm)
    if layer.rotary_base is None:
        return query, key
    if position_ids is None:
        position_ids = _positions(query, cu_seqlens, cache)
    compute_dtype = torch.promote_types(query.dtype, torch.float32)
    factors = rotary_factors(position_ids, query.shape[-1], layer.rotary_base, compute_dtype)
    return rotate(query, *factors), rotate(key, *factors)


def _fits_kernel(layer: _Layer, query: Tensor, key: Tensor) -> bool:
    """Say whether a kernel does all of it, where it is worth it: without gradients, on a GPU."""
    dtype = query.dtype
    if torch.is_grad_enabled() or dtype == torch.float64 or not has_kernel(query.device.type):
        return False
    for norm in (layer.q_norm, layer.k_norm):
        # What has taken the place of a norm has rules of its own.
        if norm is not None and (type(norm) is not nn.RMSNorm or norm.weight.dtype != dtype):
            return False
    rows, dim = query.shape[1], query.shape[-1]
    return all(
        t.stride()[2:] == (dim, 1) and t.stride(0) == rows * t.stride(1) for t in (query, key)
    )


def _normalized(heads: Tensor, norm: nn.RMSNorm | None) -> Tensor:
    if norm is None:
        return heads
    # Under autocast heads are of its dtype, and the weight is not.
    normalized: Tensor = norm(heads.to(norm.weight.dtype))
    return normalized.to(heads.dtype)


def _positions(query: Tensor, cu_seqlens: Tensor | None, cache: AttentionCache | None) -> Tensor:
    rows, device = query.shape[-3], query.device
    if cu_seqlens is not None:
        return packed_positions(cu_seqlens, rows)
    if cache is not None:
        return cache.positions(rows, device)
    return torch.arange(rows, device=device)
