# SPDX-License-Identifier: BSD-3-Clause
"""A decoding step of the layer in few kernels, which compute exactly the layer's result."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..arguments import backend_name
from ..backends.triton.kernels.project import NO_ROTARY, ROTARY_BY_POSITION
from ..state.insert_kernel import BiasOfValues
from .parts import Fusable, Part, eps_of
from .rotary import frequencies
from .step_kernels import RotaryInputs, Sizes, StepKernels

if TYPE_CHECKING:
    from ..state import KeptKeys

__all__ = ["Step"]


class Step:
    """The kernels of a layer's decoding steps, and the parts that they were made for.

    It holds the layer's parts but not the layer, which may be freed first.
    """

    def __init__(self, layer: Fusable, parts: tuple[Part, ...]) -> None:
        """Prepare kernels for the given parts."""
        self.parts = parts
        self._modules = tuple(layer._modules.values())
        self._settings = _settings(layer)
        self._amplitude, self._sink = layer.A, layer.sink
        # Converting a layer's dtype keeps its parameter objects, so store the dtype.
        self.dtype = parts[0].weight.dtype
        states, norms = parts[4], parts[5:]
        self._norms = tuple(norm.module for norm in norms)
        self._norm_eps = self._eps()
        dim, scale = layer.head_dim, layer.softmax_scale
        self._kernels = StepKernels(
            Sizes(layer.embed_dim, layer.num_heads, layer.num_kv_heads, dim),
            parts,
            BiasOfValues(states.weight, states.bias, layer.A, layer.bias_form == "exp"),
            eps=(eps_of(self._norms[0]), eps_of(self._norms[1])) if norms else (0.0, 0.0),
            rounds_norm=False,
            rotary=(NO_ROTARY if layer.rotary_base is None else ROTARY_BY_POSITION).value,
            scale=dim**-0.5 if scale is None else scale,
            backend=backend_name(layer.backend),
        )

    def is_of(self, layer: Fusable) -> bool:
        """Say whether the layer still has these modules and settings."""
        return (
            tuple(layer._modules.values()) == self._modules
            and _settings(layer) == self._settings
            and layer._parameters.get("A") is self._amplitude
            and layer._parameters.get("sink") is self._sink
            and self._eps() == self._norm_eps
            and "attend" not in layer.__dict__
            and "key_bias" not in layer.__dict__
        )

    def _eps(self) -> tuple[object, ...]:
        """Return the current epsilons of the norms."""
        return tuple(norm.eps for norm in self._norms)

    def __call__(self, layer: Fusable, x: Tensor, kept: KeptKeys) -> Tensor:
        """Return the output of the layer's forward for one token, which the cache takes in.

        Args:
            layer: that has these parts.
            x: ``(B, 1, embed_dim)``.
            kept: of the layer's cache, not empty.
        """
        start, base = kept.counter, layer.rotary_base
        assert start is not None
        rotary_frequencies = (
            x if base is None else _cached_frequencies(layer.head_dim, base, x.device)
        )
        return self._kernels(
            x,
            RotaryInputs(rotary_frequencies, start),
            kept.step,
            kept.counts,
            layer.sink,
            layer.softcap,
        )


def _settings(layer: Fusable) -> tuple[object, ...]:
    return (
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_dim,
        layer.embed_dim,
        layer.bias_form,
        layer.rotary_base is None,
        layer.softmax_scale,
        layer.softcap,
        layer.backend,
    )


@functools.lru_cache(maxsize=8)
def _cached_frequencies(dim: int, base: float, device: torch.device) -> Tensor:
    # Outside of inference mode, because all later calls read it.
    with torch.inference_mode(False):
        return frequencies(dim, base, torch.float32, device)
