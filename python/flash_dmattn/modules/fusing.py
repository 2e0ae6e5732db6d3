# SPDX-License-Identifier: BSD-3-Clause
"""Whether a call of the layer is a decoding step that can be fused."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from ..arguments import autocast_dtype
from ..dispatch_state import PLAIN_TYPES
from ..state.stepping import has_kernel
from .cache import AttentionCache
from .parts import Fusable, Part, Projecting

if TYPE_CHECKING:
    from .step import Step

__all__ = ["are_unmodified", "fused_step", "is_token", "is_unmodified", "plain_parts"]

# Beyond these sizes matrix products are faster than the kernels' vector products.
_MAX_SEQUENCES = 4
_MAX_WEIGHTS = 1 << 23
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "dt_proj")
_NORMS = ("q_norm", "k_norm")
_METHODS = ("attend", "key_bias")
# Steps by layer, valid until the layer changes.
_steps: weakref.WeakKeyDictionary[Fusable, Step] = weakref.WeakKeyDictionary()


def fused_step(
    layer: Fusable,
    kind: type,
    hidden_states: Tensor,
    cache: AttentionCache | None,
    *excluded: Any,
) -> Step | None:
    """Return kernels that compute exactly the layer's result for one token without gradients.

    Return None if the kernels do not support the call.

    Args:
        layer: its parts may be replaced, hooked or overridden.
        kind: the class whose methods are fused.
        hidden_states: ``(B, N, embed_dim)``, not checked yet.
        cache: of the call, not checked yet.
        *others: arguments of the call, all of which must be None.
    """
    if cache is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if type(cache) is not AttentionCache or any(argument is not None for argument in excluded):
        return None
    kept = cache.kept
    if kept is None or kept.rollback or not is_token(hidden_states):
        return None
    (batch, _, width), dtype = hidden_states.shape, hidden_states.dtype
    device = hidden_states.device
    if width != layer.embed_dim or not has_kernel(device.type):
        return None
    token_shape = batch, layer.num_kv_heads, layer.head_dim
    if (layer.window_size, layer.keep_last, layer.keep_first) != kept.counts:
        return None
    if not kept.has_slots_for(token_shape, hidden_states):
        return None
    step = _steps.get(layer)
    if (
        step is not None
        and step.dtype == dtype
        and step.is_of(layer)
        and are_unmodified(step.parts, dtype, device)
    ):
        return step
    parts = _plain_parts(layer, kind)
    if parts is None or not are_unmodified(parts, dtype, device):
        return None
    from .step import Step

    step = _steps[layer] = Step(layer, parts)
    return step


def is_token(x: Any) -> bool:
    """Say whether these are states of one token, ``(B, 1, width)``, that the kernels can read."""
    return (
        type(x) in PLAIN_TYPES
        and x.dim() == 3
        and x.shape[1] == 1
        and 0 < x.shape[0] <= _MAX_SEQUENCES
        and x.dtype != torch.float64
        and x.stride(2) == 1
        and not x.is_neg()
        and autocast_dtype(x) is None
    )


def _plain_parts(layer: Fusable, kind: type) -> tuple[Part, ...] | None:
    """Return the parts of a layer if they compute the same as those of a new layer, else None."""
    for name in _METHODS:
        if getattr(type(layer), name) is not getattr(kind, name) or name in layer.__dict__:
            return None
    for norm in (layer.q_norm, layer.k_norm):
        if type(norm) is nn.RMSNorm and norm.eps is None:  # torch's default depends on its version
            return None
    return (
        plain_parts(layer, nn.RMSNorm) if layer.is_causal and _has_valid_settings(layer) else None
    )


def _has_valid_settings(layer: Fusable) -> bool:
    """Say whether attention accepts settings that may have changed since the layer was made.

    This is checked first, because the step writes into the cache before attention could raise.
    """
    scale, sink = layer.softmax_scale, layer.sink
    return (
        0 <= layer.softcap < math.inf
        and (scale is None or math.isfinite(scale))
        and (sink is None or sink.shape == (layer.num_heads,))
    )


def plain_parts(layer: Projecting, norm: type[nn.Module]) -> tuple[Part, ...] | None:
    """Return projections and norms if they are not replaced, otherwise None.

    Args:
        layer: that has them.
        norm: the required class of its norms, if it has any.
    """
    if type(layer.A) is not nn.Parameter:
        return None
    parts: list[Part] = []
    for name in (*_PROJECTIONS, *_NORMS):
        module: nn.Module | None = getattr(layer, name)
        if module is None and name in _NORMS:
            continue
        wanted = norm if name in _NORMS else nn.Linear
        if module is None or type(module) is not wanted:
            return None
        bias = module._parameters.get("bias")
        weight = module._parameters.get("weight")
        if weight is None or weight.numel() > _MAX_WEIGHTS:
            return None
        if name in _PROJECTIONS and parts and (bias is None) != (parts[0].bias is None):
            return None
        parts.append(Part(module, wanted, weight, bias))
    return tuple(parts)


def is_unmodified(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Say whether a module is of this class, without hooks or a replaced forward."""
    return (
        type(module) is kind
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and "forward" not in module.__dict__
        and not nn_module._global_forward_hooks
        and not nn_module._global_forward_pre_hooks
        and not nn_module._global_backward_hooks
        and not nn_module._global_backward_pre_hooks
    )


def are_unmodified(parts: tuple[Part, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Say whether no part of a layer has been replaced, hooked, moved or converted."""
    for module, kind, weight, bias in parts:
        parameters = module._parameters
        if (
            not is_unmodified(module, kind)
            or parameters.get("weight") is not weight
            or parameters.get("bias") is not bias
        ):
            return False
        for parameter in (weight, bias):
            if parameter is not None and (
                type(parameter) is not nn.Parameter
                or parameter.dtype != dtype
                or parameter.device != device
                or not parameter.is_contiguous()
            ):
                return False
    return True
