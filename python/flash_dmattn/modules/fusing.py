# SPDX-License-Identifier: BSD-3-Clause
"""Whether a call of the layer is a decoding step whose parts can be fused."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..arguments import autocast_dtype
from ..state.stepping import has_kernel
from .cache import AttentionCache

__all__ = ["Fusable", "is_fused_step"]

# Of more sequences, or of larger projections, products of matrices are faster than of vectors.
_MOST_SEQUENCES = 4
_MOST_WEIGHTS = 1 << 23
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "dt_proj")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class Fusable(Protocol):
    """The parts of a layer, and what it is told."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    dt_proj: nn.Linear
    q_norm: nn.RMSNorm | None
    k_norm: nn.RMSNorm | None
    A: nn.Parameter
    sink: nn.Parameter | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias_form: str
    rotary_base: float | None
    softcap: float
    softmax_scale: float | None
    backend: str | None


def is_fused_step(
    layer: Fusable,
    kind: type,
    hidden_states: Tensor,
    cache: AttentionCache | None,
    *others: Any,
) -> bool:
    """Say whether kernels compute just what the layer would: of one token, without gradients.

    Args:
        layer: whose parts may have been replaced, hooked or overridden.
        kind: the class whose methods are fused.
        hidden_states: ``(B, N, embed_dim)``.
        cache: of the call.
        *others: arguments of the call, all of which must be None.
    """
    if cache is None or cache.kept is None or cache.kept.counter is None or cache.rollback:
        return False
    batch, tokens = hidden_states.shape[:2]
    if tokens != 1 or not 0 < batch <= _MOST_SEQUENCES or torch.is_grad_enabled():
        return False
    if any(other is not None for other in others) or not has_kernel(hidden_states.device.type):
        return False
    dtype = hidden_states.dtype
    if dtype == torch.float64 or autocast_dtype(hidden_states) is not None:
        return False
    return _is_plain(layer, kind, dtype)


def _is_plain(layer: Fusable, kind: type, dtype: torch.dtype) -> bool:
    for name in ("attend", "key_bias"):
        if getattr(type(layer), name) is not getattr(kind, name):
            return False
    biased = layer.q_proj.bias is not None
    for name in _PROJECTIONS:
        part = getattr(layer, name)
        if type(part) is not nn.Linear or not _is_untouched(part, dtype):
            return False
        if (part.bias is not None) != biased or part.weight.numel() > _MOST_WEIGHTS:
            return False
    for name in ("q_norm", "k_norm"):
        norm = getattr(layer, name)
        if norm is not None and (type(norm) is not nn.RMSNorm or not _is_untouched(norm, dtype)):
            return False
    return True


def _is_untouched(part: nn.Linear | nn.RMSNorm, dtype: torch.dtype) -> bool:
    weight = part.weight
    if type(weight) is not nn.Parameter or weight.dtype != dtype or not weight.is_contiguous():
        return False
    return not any(getattr(part, name) for name in _HOOKS)
