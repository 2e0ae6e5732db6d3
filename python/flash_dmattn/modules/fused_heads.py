# SPDX-License-Identifier: BSD-3-Clause
"""Norm and rotation of heads in one kernel, and their gradients in another.

PyTorch's operations read and write heads about twenty times, mostly in float32. In a training step
that may take longer than attention.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn.functional import rms_norm

from .. import dispatch_state
from ..backends.triton.bound_kernel import BoundKernel
from ..backends.triton.kernels.heads import differentiate_heads, prepare_heads
from .rotary import rotate

__all__ = ["CosSin", "norm_and_rotate"]

# Cosines and sines, ({B|1}, N, 1, D / 2) each.
CosSin = tuple[Tensor, Tensor]

# Elements in half of a program's rows, and its warps.
_BLOCK, _WARPS = 1024, 4


def norm_and_rotate(
    heads: Tensor, weight: Tensor | None, eps: float, factors: CosSin | None
) -> Tensor:
    """Return heads after `rms_norm` and `rotate`.

    Args:
        heads: ``(..., N, heads, D)``, float32 or of 16 bits, each token's heads contiguous.
        weight: of the norm, ``(D,)``, float32 or of heads' dtype; None for no norm.
        eps: of the norm.
        factors: of the rotation; None for none.
    """
    # Positions may have their batch last in memory, and then factors have the same order.
    cos, sin = (None, None) if factors is None else (each.contiguous() for each in factors)
    prepared: Tensor = _NormAndRotate.apply(heads, weight, cos, sin, eps)  # type: ignore[no-untyped-call]
    return prepared


class _NormAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        heads: Tensor,
        weight: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        eps: float,
    ) -> Tensor:
        ctx.save_for_backward(heads, weight, cos, sin)
        ctx.eps = eps
        prepared = torch.empty_like(heads, memory_format=torch.contiguous_format)
        _launch((), _HeadInputs(heads, weight, cos, sin), (prepared,), eps)
        return prepared

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs = _HeadInputs(*ctx.saved_tensors)
        # Use operations for a double backward, under torch.vmap, or if a mode observes the call.
        if torch.is_grad_enabled() or not dispatch_state.is_idle(
            (gradient, *inputs), or_profiled=True
        ):
            return (*_by_operations(inputs, ctx.eps, gradient), None, None, None)
        heads, weight, *_ = inputs
        result = torch.empty_like(heads, memory_format=torch.contiguous_format)
        programs = 0 if weight is None else _programs(heads)
        parts = heads.new_empty(programs, heads.shape[-1], dtype=torch.float32)
        _launch((gradient.contiguous(),), inputs, (result, parts), ctx.eps)
        of_weight = None if weight is None else parts.sum(0).to(weight.dtype)
        return result, of_weight, None, None, None


class _HeadInputs(NamedTuple):
    heads: Tensor
    weight: Tensor | None
    cos: Tensor | None
    sin: Tensor | None


def _by_operations(
    inputs: _HeadInputs, eps: float, gradient: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of heads and weight, by torch operations."""
    heads, weight, cos, sin = inputs
    is_recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        prepared = heads
        if weight is not None:
            prepared = rms_norm(heads.to(weight.dtype), weight.shape, weight, eps).to(heads.dtype)
        if cos is not None and sin is not None:
            prepared = rotate(prepared, cos, sin)
    leaves = [t for t in (heads, weight) if t is not None and t.requires_grad]
    found = torch.autograd.grad(prepared, leaves, gradient, create_graph=is_recorded)
    gradients = dict(zip(leaves, found, strict=True))
    return gradients.get(heads), None if weight is None else gradients.get(weight)


def _launch(
    gradients: tuple[Tensor, ...], inputs: _HeadInputs, results: tuple[Tensor, ...], eps: float
) -> None:
    """Start a kernel: that of backward if ``gradients`` has a gradient."""
    heads, cos = inputs.heads, inputs.cos
    count, dim = heads.shape[-2:]
    token = heads.flatten(0, -3).stride(0)
    positions = 1 if cos is None else cos.numel() // (dim // 2)
    dtypes = tuple(None if tensor is None else tensor.dtype for tensor in inputs)
    # In place of absent tensors pass one that the kernel does not read.
    inputs_or_heads = [heads if tensor is None else tensor for tensor in inputs]
    _bind_kernel(bool(gradients), count, dim, dtypes).start(
        (_programs(heads), 1, 1),
        (*gradients, *inputs_or_heads, *results),
        (eps, heads.numel() // dim, positions, token),
    )


def _programs(heads: Tensor) -> int:
    dim = heads.shape[-1]
    return int(triton.cdiv(heads.numel() // dim, _rows(dim)))


def _rows(dim: int) -> int:
    """Return the number of rows of a program."""
    return max(1, _BLOCK // int(triton.next_power_of_2((dim + 1) // 2)))


@functools.lru_cache(maxsize=64)
def _bind_kernel(
    is_backward: bool, heads: int, dim: int, dtypes: tuple[torch.dtype | None, ...]
) -> BoundKernel:
    """Return the kernel for these sizes, and only for tensors of these dtypes; None for an absent
    tensor.
    """
    _, weight, cos, _ = dtypes
    half = (dim + 1) // 2
    return BoundKernel(
        differentiate_heads if is_backward else prepare_heads,
        _WARPS,
        HEADS=heads,
        DIM=dim,
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        ROWS=_rows(dim),
        NORMED=weight is not None,
        ROTATED=cos is not None,
    )
