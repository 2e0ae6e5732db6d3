# SPDX-License-Identifier: BSD-3-Clause
"""A decoding step of the layer in few kernels, where what they fuse is what the layer computes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor, nn

from ..backends.triton.kernels.project import project_heads
from ..interface import flash_dmattn_func
from ..state.insert_kernel import BiasOfValues, launch_insert
from .rotary import frequencies

if TYPE_CHECKING:
    from ..state import KeptKeys
    from .fusing import Fusable

__all__ = ["step"]

_COLUMNS = 256


def step(layer: Fusable, hidden_states: Tensor, kept: KeptKeys) -> Tensor:
    """Return what the layer's forward returns for one token, and take it in.

    Args:
        layer: one that `.fusing` lets through.
        hidden_states: ``(B, 1, embed_dim)``.
        kept: of the layer's cache, not empty.
    """
    batch, _, width = hidden_states.shape
    heads, kv_heads, dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
    query = hidden_states.new_empty(batch, 1, heads, dim)
    key, value = hidden_states.new_empty(2, batch, 1, kv_heads, dim)
    start = kept.counter
    assert start is not None
    norms = layer.q_norm, layer.k_norm
    _project(
        hidden_states,
        (layer.q_proj, layer.k_proj, layer.v_proj),
        (query, key, value),
        None if norms[0] is None or norms[1] is None else (norms[0], norms[1]),
        layer.rotary_base,
        start,
    )
    bias = BiasOfValues(layer.dt_proj.weight, layer.dt_proj.bias, layer.A, layer.bias_form == "exp")
    rows = kept.step(lambda held, counter: launch_insert(held, key, value, bias, counter))
    out = flash_dmattn_func(
        query,
        rows.key,
        rows.value,
        None,
        rows.bias,
        layer.softmax_scale,
        False,
        layer.softcap,
        sink=layer.sink,
        backend=layer.backend,
    )
    assert isinstance(out, Tensor)
    result = hidden_states.new_empty(batch, 1, width)
    # A "head" of the output is a part of it.
    _project(out.flatten(-2), (layer.o_proj,), (result.view(batch, 1, -1, _part(width)),))
    return result


def _part(width: int) -> int:
    """Return a divisor of the width, such that there are about as many parts as SMs."""
    return next(part for part in (16, 8, 4, 2, 1) if width % part == 0)


def _project(
    x: Tensor,
    projections: tuple[nn.Linear, ...],
    results: tuple[Tensor, ...],
    norms: tuple[nn.RMSNorm, nn.RMSNorm] | None = None,
    base: float | None = None,
    start: Tensor | None = None,
) -> None:
    """Start the kernel for one projection, or for those of queries, keys and values."""
    batch, _, width = x.shape
    heads, dim = results[0].shape[2:]
    kv_heads = results[1].shape[2] if len(results) > 1 else 0
    half = (dim + 1) // 2
    weights = [projection.weight for projection in projections]
    biases = [projection.bias for projection in projections]
    given = [weight if bias is None else bias for weight, bias in zip(weights, biases, strict=True)]
    others = 3 - len(projections)
    frequency = x if base is None else _kept_frequencies(dim, base, x.device)
    project_heads[(heads + 2 * kv_heads, batch)](
        x,
        *weights,
        *weights[:1] * others,
        *given,
        *given[:1] * others,
        *(weights[:1] * 2 if norms is None else (norm.weight for norm in norms)),
        frequency,
        x if start is None else start,
        *results,
        *results[:1] * others,
        *((0.0, 0.0) if norms is None else (_eps(norm) for norm in norms)),
        x.stride(0),
        WIDTH=width,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_WIDTH=min(_COLUMNS * max(1, 32 // half), triton.next_power_of_2(width)),
        BIASED=biases[0] is not None,
        NORM=norms is not None,
        TURN=base is not None,
        num_warps=8,
    )


def _eps(norm: nn.RMSNorm) -> float:
    return torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps


@functools.lru_cache(maxsize=8)
def _kept_frequencies(dim: int, base: float, device: torch.device) -> Tensor:
    # Outside of inference mode, as every later call reads it.
    with torch.inference_mode(False):
        return frequencies(dim, base, torch.float32, device)
