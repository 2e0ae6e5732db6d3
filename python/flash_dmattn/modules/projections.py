# SPDX-License-Identifier: BSD-3-Clause
"""Projections of hidden states to heads of queries, keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from .. import checks, dispatch_state
from .arguments import check_cu_seqlens, check_fits_projection
from .fusing import is_unmodified
from .parts import Headed

__all__ = ["check_states", "draw_parameters", "project_to_heads"]


def draw_parameters(layer: nn.Module, std: float) -> None:
    """Draw weights from a normal distribution; set biases to 0 and norms to 1."""
    for module in layer.children():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.RMSNorm):
            module.reset_parameters()


def check_states(layer: Headed, hidden_states: Tensor, cu_seqlens: Tensor | None) -> None:
    """Raise unless a layer's input fits its projections."""
    checks.tensor("hidden_states", hidden_states)
    form = "(B, N, embed_dim)" if cu_seqlens is None else "(total, embed_dim) with cu_seqlens"
    shape, width = tuple(hidden_states.shape), layer.embed_dim
    if len(shape) != (3 if cu_seqlens is None else 2) or shape[-1] != width:
        raise ValueError(f"hidden_states must have shape {form}, embed_dim={width}, got {shape}")
    # Other modules, for example quantized ones, have their own rules. A hook may set the weight
    # only when the projection is called.
    if is_unmodified(layer.q_proj, nn.Linear):
        check_fits_projection(hidden_states, layer.q_proj.weight)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, hidden_states)


def project_to_heads(layer: Headed, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return query ``(..., H, D)``, key and value ``(..., Hk, D)`` of states ``(..., embed_dim)``.

    In training they are views of one product: the gradient of the states is then one product, too,
    instead of a sum of three, and autocast casts the states once. torch.jit.trace is excluded,
    because its recording also runs without gradients.
    """
    modules = layer.q_proj, layer.k_proj, layer.v_proj
    counts = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    is_training = torch.is_grad_enabled() and not dispatch_state.is_recorded_by_jit()
    if is_training and _can_be_joined(modules, [n * layer.head_dim for n in counts]):
        weight = torch.cat([module.weight for module in modules])
        bias = None if modules[0].bias is None else torch.cat([module.bias for module in modules])
        states = linear(hidden_states, weight, bias)
        query, key, value = _split_heads(states, sum(counts), layer.head_dim).split(counts, -2)
        return query, key, value
    query, key, value = (
        _split_heads(module(hidden_states), count, layer.head_dim)
        for module, count in zip(modules, counts, strict=True)
    )
    return query, key, value


def _split_heads(states: Tensor, count: int, dim: int) -> Any:
    return states.unflatten(-1, (count, dim))  # type: ignore[no-untyped-call]


def _can_be_joined(modules: tuple[nn.Linear, ...], widths: list[int]) -> bool:
    """Say whether these are trainable plain linear layers without hooks.

    If a width is wrong, separate products give clearer errors, if there is an error at all.
    """
    first = modules[0]
    for module, width in zip(modules, widths, strict=True):
        if not is_unmodified(module, nn.Linear) or (module.bias is None) != (first.bias is None):
            return False
        weight = module.weight
        if (
            type(weight) not in dispatch_state.PLAIN_TYPES
            or not weight.requires_grad
            or len(weight) != width
        ):
            return False
        if weight.dtype != first.weight.dtype or weight.device != first.weight.device:
            return False
    return True
