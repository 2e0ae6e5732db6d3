# SPDX-License-Identifier: BSD-3-Clause
"""The start of the kernel that normalises and rotates the heads of queries and keys."""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor, nn

from ..backends.triton.kernels.heads import prepare_heads
from .rotary import frequencies

__all__ = ["start_kernel"]


def start_kernel(
    query: Tensor,
    key: Tensor,
    norms: tuple[nn.RMSNorm, nn.RMSNorm] | None,
    base: float | None,
    start: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return query and key, normalised and rotated, without gradients.

    Args:
        query: ``(B, N, H, D)``, the heads of a token one after another.
        key: ``(B, N, Hk, D)``, as query.
        norms: of query and key.
        base: of the rotary embedding.
        start: integers of which the first is the position of the first token.
    """
    batch, tokens, heads, dim = query.shape
    kv_heads = key.shape[2]
    results = (torch.empty_like(query), torch.empty_like(key))
    weights = (query, key) if norms is None else tuple(norm.weight for norm in norms)
    turn = start if base is None else _kept_frequencies(dim, base, query.device)
    prepare_heads[(batch * tokens * (heads + kv_heads),)](
        query,
        key,
        *weights,
        turn,
        start,
        *results,
        *((0.0, 0.0) if norms is None else (_eps(norm) for norm in norms)),
        tokens,
        query.stride(1),
        key.stride(1),
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK=triton.next_power_of_2(dim),
        NORM=norms is not None,
        TURN=base is not None,
        num_warps=1,
    )
    return results


def _eps(norm: nn.RMSNorm) -> float:
    return torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps


@functools.lru_cache(maxsize=8)
def _kept_frequencies(dim: int, base: float, device: torch.device) -> Tensor:
    # Outside of inference mode, as every later call reads it.
    with torch.inference_mode(False):
        return frequencies(dim, base, torch.float32, device)
