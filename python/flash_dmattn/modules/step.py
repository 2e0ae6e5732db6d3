# SPDX-License-Identifier: BSD-3-Clause
"""A decoding step of the layer in few kernels, where what they fuse is what the layer computes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor, nn

from .. import ops
from ..arguments import backend_name, resolved_deterministic
from ..backends.triton.kernels.project import project_heads
from ..backends.triton.prepared import Prepared
from ..record import AttentionInputs
from ..state.insert_kernel import BiasOfValues, launch_insert
from .parts import Fusable, Part
from .rotary import frequencies

if TYPE_CHECKING:
    from ..state import KeptKeys

__all__ = ["Step"]

_COLUMNS = 256
_WARPS = 8


class Step:
    """The kernels of a layer's decoding steps, and what they were made for.

    It holds the layer's parts and not the layer, which may be freed before it.
    """

    def __init__(self, layer: Fusable, parts: tuple[Part, ...]) -> None:
        """Prepare kernels for the parts that were found."""
        self.parts = parts
        self._modules = tuple(layer._modules.values())
        self._settings = _settings(layer)
        self._amplitude = layer.A
        query, key, value, output, states = parts[:5]
        # A layer is converted in place, which leaves its parameters what they are.
        self.dtype = query.weight.dtype
        self._is_exponential = layer.bias_form == "exp"
        self._states = states
        heads, kv_heads, dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
        self._heads, self._kv_heads, self._dim = heads, kv_heads, dim
        width, inner = layer.embed_dim, heads * dim
        biased, part = query.bias is not None, _part(width)
        self._scale = dim**-0.5 if layer.softmax_scale is None else layer.softmax_scale
        self._backend = backend_name(layer.backend)
        self._into_heads = _prepared(
            width, heads, kv_heads, dim, biased, len(parts) > 5, layer.rotary_base is not None
        )
        # A "head" of the output is a part of it.
        self._out_of_heads = _prepared(inner, width // part, 0, part, biased, False, False)
        self._outputs = width // part
        self._weights = (query.weight, key.weight, value.weight)
        self._biases = tuple(
            weight if given.bias is None else given.bias
            for weight, given in zip(self._weights, parts, strict=False)
        )
        self._norms, self._eps = self._weights[:2], (0.0, 0.0)
        if len(parts) > 5:
            self._norms = (parts[5].weight, parts[6].weight)
            self._eps = (_eps(parts[5].module), _eps(parts[6].module))
        self._output = (output.weight,) * 3
        self._output_bias = (output.weight if output.bias is None else output.bias,) * 3

    def is_of(self, layer: Fusable) -> bool:
        """Say whether the layer still has these modules and settings."""
        return (
            tuple(layer._modules.values()) == self._modules
            and _settings(layer) == self._settings
            and layer._parameters.get("A") is self._amplitude
            and "attend" not in layer.__dict__
            and "key_bias" not in layer.__dict__
        )

    def __call__(self, layer: Fusable, x: Tensor, kept: KeptKeys) -> Tensor:
        """Return what the layer's forward returns for one token, and take it in.

        Args:
            layer: whose parts these are.
            x: ``(B, 1, embed_dim)``.
            kept: of the layer's cache, not empty.
        """
        batch, _, width = x.shape
        heads, kv_heads, dim = self._heads, self._kv_heads, self._dim
        query = x.new_empty(batch, 1, heads, dim)
        key, value = x.new_empty(2, batch, 1, kv_heads, dim)
        start = kept.counter
        assert start is not None
        base = layer.rotary_base
        turns = x if base is None else _kept_frequencies(dim, base, x.device)
        self._into_heads.start(
            (heads + 2 * kv_heads, batch, 1),
            (x, *self._weights, *self._biases, *self._norms, turns, start, query, key, value),
            (*self._eps, x.stride(0)),
        )
        states = self._states
        bias = BiasOfValues(states.weight, states.bias, self._amplitude, self._is_exponential)
        rows = kept.step(lambda held, counter: launch_insert(held, key, value, bias, counter))
        inputs = AttentionInputs(
            query,
            rows.key,
            rows.value,
            bias=rows.bias,
            sink=layer.sink,
            scale=self._scale,
            softcap=layer.softcap,
            deterministic=resolved_deterministic(None),
        )
        out, _ = ops.attention(inputs, self._backend, need_lse=False)
        result = x.new_empty(batch, 1, width)
        self._out_of_heads.start(
            (self._outputs, batch, 1),
            (out, *self._output, *self._output_bias, *self._norms, out, out, *(result,) * 3),
            (0.0, 0.0, out.stride(0)),
        )
        return result


def _settings(layer: Fusable) -> tuple[object, ...]:
    return (
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_dim,
        layer.embed_dim,
        layer.bias_form,
        layer.rotary_base is None,
        layer.softmax_scale,
        layer.backend,
    )


def _part(width: int) -> int:
    """Return a divisor of the width, such that there are about as many parts as SMs."""
    return next(part for part in (16, 8, 4, 2, 1) if width % part == 0)


def _prepared(
    width: int, heads: int, kv_heads: int, dim: int, biased: bool, normed: bool, turned: bool
) -> Prepared:
    half = (dim + 1) // 2
    return Prepared(
        project_heads,
        _WARPS,
        WIDTH=width,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_WIDTH=min(_COLUMNS * max(1, 32 // half), triton.next_power_of_2(width)),
        BIASED=biased,
        NORM=normed,
        TURN=turned,
    )


def _eps(norm: nn.Module) -> float:
    assert isinstance(norm, nn.RMSNorm)
    return torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps


@functools.lru_cache(maxsize=8)
def _kept_frequencies(dim: int, base: float, device: torch.device) -> Tensor:
    # Outside of inference mode, as every later call reads it.
    with torch.inference_mode(False):
        return frequencies(dim, base, torch.float32, device)
