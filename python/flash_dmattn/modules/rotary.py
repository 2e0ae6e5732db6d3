# SPDX-License-Identifier: BSD-3-Clause
"""Rotary position embedding (RoFormer, arXiv:2104.09864), and the positions of packed tokens."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["frequencies", "packed_positions", "rotary_factors", "rotate"]


def packed_positions(cu_seqlens: Tensor, total: int) -> Tensor:
    """Return int64 ``(total,)``: the position of each packed token in its own sequence."""
    token = torch.arange(total, device=cu_seqlens.device)
    bounds = cu_seqlens.to(torch.int64)
    return token - bounds[torch.searchsorted(bounds, token, right=True) - 1]


def rotary_factors(
    positions: Tensor, head_dim: int, base: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin ``(*positions, 1, head_dim / 2)`` of ``position * base ** (-2 i / D)``.

    Computed in each call and not kept as a buffer, because ``module.to(torch.bfloat16)`` would
    round it: bfloat16 does not represent all positions above 256 exactly.
    """
    angle = positions[..., None, None].to(dtype) * frequencies(
        head_dim, base, dtype, positions.device
    )
    return angle.cos(), angle.sin()


def frequencies(head_dim: int, base: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``base ** (-2 i / D)``, ``(head_dim / 2,)``."""
    half = head_dim // 2
    return base ** -(torch.arange(half, device=device, dtype=dtype) / half)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``(..., rows, heads, D)``: element i forms a pair with element ``i + D / 2``.

    This is the order of Llama's and Doge's weights, not the neighboring pairs of RoFormer. Computed
    in the dtype of the factors, returned in that of x.
    """
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)
