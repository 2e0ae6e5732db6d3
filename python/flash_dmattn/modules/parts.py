# SPDX-License-Identifier: BSD-3-Clause
"""The parts of a layer that fused kernels compute."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import nn

__all__ = ["Fusable", "Headed", "Part", "Projecting", "eps_of"]


class Headed(Protocol):
    """The projections of hidden states to heads, and their sizes."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


class Projecting(Protocol):
    """The parts of a layer."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    dt_proj: nn.Linear
    A: nn.Parameter
    _modules: dict[str, nn.Module | None]
    _parameters: dict[str, nn.Parameter | None]


class Fusable(Projecting, Headed, Protocol):
    """The parts of a layer, and its settings."""

    q_norm: nn.RMSNorm | None
    k_norm: nn.RMSNorm | None
    sink: nn.Parameter | None
    window_size: int | None
    keep_last: int
    keep_first: int
    is_causal: bool
    bias_form: str
    rotary_base: float | None
    softcap: float
    softmax_scale: float | None
    backend: str | None


class Part(NamedTuple):
    """A module of a layer and its parameters, as recorded."""

    module: nn.Module
    kind: type[nn.Module]
    weight: nn.Parameter
    bias: nn.Parameter | None


def eps_of(norm: nn.Module) -> float:
    """Return the epsilon of a norm, which must be set."""
    assert isinstance(norm, nn.RMSNorm)
    assert norm.eps is not None
    return float(norm.eps)
