# SPDX-License-Identifier: BSD-3-Clause
"""What is done with the heads of queries and keys between their projections and attention."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

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
    query, key = _normalized(query, layer.q_norm), _normalized(key, layer.k_norm)
    if layer.rotary_base is None:
        return query, key
    if position_ids is None:
        position_ids = _positions(query, cu_seqlens, cache)
    compute_dtype = torch.promote_types(query.dtype, torch.float32)
    factors = rotary_factors(position_ids, query.shape[-1], layer.rotary_base, compute_dtype)
    return rotate(query, *factors), rotate(key, *factors)


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
