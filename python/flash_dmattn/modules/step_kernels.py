# SPDX-License-Identifier: BSD-3-Clause
"""The kernels of a decoding step: projection to heads, insertion into the kept keys, output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import triton
from torch import Tensor, nn

from .. import ops
from ..arguments import resolved_deterministic
from ..backends.triton.bound_kernel import BoundKernel
from ..backends.triton.kernels.project import (
    NO_NORM,
    NO_ROTARY,
    RMS_NORM,
    ROUNDED_NORM,
    project_heads,
)
from ..record import AttentionInputs, KeyCounts
from ..state.insert_kernel import BiasOfValues, launch_insert
from ..state.rows import Rows
from .parts import Part

__all__ = ["RotaryInputs", "Sizes", "StepKernels"]

_COLUMNS = 256
_WARPS = 8


class Sizes(NamedTuple):
    """The sizes of a layer."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int


class RotaryInputs(NamedTuple):
    """The rotation of heads, in the kernel's form."""

    frequencies_or_cos: Tensor
    position_or_sin: Tensor
    row_stride: int = 0  # elements between the values of consecutive sequences


# Writes a token into rows by a function of the rows and their counter; returns the rows.
Write = Callable[[Callable[[Rows, Tensor], None]], Rows]


class StepKernels:
    """The kernels for a layer of given sizes, with the parameters that they read."""

    def __init__(
        self,
        sizes: Sizes,
        parts: Sequence[Part],
        bias: BiasOfValues,
        *,
        eps: tuple[float, float],
        rounds_norm: bool,
        rotary: int,
        scale: float,
        backend: str,
    ) -> None:
        """Prepare the kernels; they are compiled at their first launch.

        Args:
            sizes: of the layer.
            parts: projections to queries, keys, values, the output and the states of biases, then
                the norms of queries and keys, or none.
            bias: how the bias of a key is computed from its values.
            eps: of the two norms.
            rounds_norm: the norms round before the product with the weight.
            rotary: the kind of rotation, a constant of the kernel.
            scale: of the scores.
            backend: of attention.
        """
        query, key, value, output = parts[:4]
        width, heads, kv_heads, dim = sizes
        self._sizes, self._bias, self._eps = sizes, bias, eps
        self._scale, self._backend = scale, backend
        has_norm, has_bias, slice_columns = (
            len(parts) > 5,
            query.bias is not None,
            _slice_columns(width),
        )
        norm = (ROUNDED_NORM if rounds_norm else RMS_NORM) if has_norm else NO_NORM
        self._project_in = _bind_projection(
            width, heads, kv_heads, dim, has_bias, norm.value, rotary
        )
        # A "head" of the output is a slice of its columns.
        self._project_out = _bind_projection(
            heads * dim,
            width // slice_columns,
            0,
            slice_columns,
            has_bias,
            NO_NORM.value,
            NO_ROTARY.value,
        )
        self._output_slices = width // slice_columns
        self._weights = (query.weight, key.weight, value.weight)
        self._biases = tuple(
            weight if part.bias is None else part.bias
            for weight, part in zip(self._weights, parts, strict=False)
        )
        self._norms = (parts[5].weight, parts[6].weight) if has_norm else self._weights[:2]
        self._output = (output.weight,) * 3
        self._output_bias = (output.weight if output.bias is None else output.bias,) * 3

    def __call__(
        self,
        x: Tensor,
        rotary: RotaryInputs,
        write: Write,
        counts: KeyCounts,
        sink: nn.Parameter | None,
        softcap: float,
    ) -> Tensor:
        """Return the output ``(B, 1, width)`` for one token, which is inserted.

        Args:
            x: ``(B, 1, width)``.
            rotary: its rotation.
            write: writes it into the kept rows.
            counts: of the kept rows.
            sink, softcap: as in `flash_dmattn_func`.
        """
        batch = x.shape[0]
        width, heads, kv_heads, dim = self._sizes
        query = x.new_empty(batch, 1, heads, dim)
        key, value = x.new_empty(2, batch, 1, kv_heads, dim)
        self._project_in.start(
            (heads + 2 * kv_heads, batch, 1),
            (x, *self._weights, *self._biases, *self._norms, *rotary[:2], query, key, value),
            (*self._eps, x.stride(0), rotary.row_stride),
        )
        token_and_bias = key, value, self._bias
        rows = write(lambda held, counter: launch_insert(held, *token_and_bias, counter, counts))
        inputs = AttentionInputs(
            query,
            rows.key,
            rows.value,
            bias=rows.bias,
            sink=sink,
            scale=self._scale,
            softcap=softcap,
            deterministic=resolved_deterministic(None),
        )
        out, _ = ops.attention(inputs, self._backend, need_lse=False)
        result = x.new_empty(batch, 1, width)
        self._project_out.start(
            (self._output_slices, batch, 1),
            (out, *self._output, *self._output_bias, *self._norms, out, out, *(result,) * 3),
            (0.0, 0.0, out.stride(0), 0),
        )
        return result


def _slice_columns(width: int) -> int:
    """Return a divisor of the width that gives about as many parts as there are SMs."""
    return next(part for part in (16, 8, 4, 2, 1) if width % part == 0)


def _bind_projection(
    width: int, heads: int, kv_heads: int, dim: int, has_bias: bool, norm: int, rotary: int
) -> BoundKernel:
    half = (dim + 1) // 2
    return BoundKernel(
        project_heads,
        _WARPS,
        WIDTH=width,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_WIDTH=min(_COLUMNS * max(1, 32 // half), triton.next_power_of_2(width)),
        BIASED=has_bias,
        NORM=norm,
        ROTARY=rotary,
    )
