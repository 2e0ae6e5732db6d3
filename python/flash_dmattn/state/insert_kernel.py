# SPDX-License-Identifier: BSD-3-Clause
"""The launch of the kernel that inserts a token, in place of thirty operations of `.stepping`."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.graph import increment_version

from ..backends.triton.bound_kernel import BoundKernel
from ..backends.triton.kernels.insert import EXPONENTIAL, GIVEN, SOFTPLUS, insert
from ..record import KeyCounts
from .rows import Rows

# More biases than this are searched in parts.
_MAX_ROWS_AT_ONCE = 4096


class BiasOfValues(NamedTuple):
    """How the bias of a key is computed from the values of all its heads."""

    weight: Tensor  # (Hk, Hk D), contiguous
    states_bias: Tensor | None  # (Hk,)
    amplitude: Tensor  # (Hk,)
    is_exponential: bool


def launch_insert(
    held: Rows,
    key: Tensor,
    value: Tensor,
    bias: Tensor | BiasOfValues,
    counter: Tensor,
    counts: KeyCounts,
) -> None:
    """Write one token into rows, each set of which belongs to one head of the bias.

    Args:
        held: the rows, contiguous.
        key, value: ``(B, 1, Hk, D)``; value is contiguous if the bias is computed.
        bias: ``(B, h, 1, 1)``, or how it is computed.
        counter: int64 ``(3,)``: the position of the token, which is incremented; an unchanged
            number; and 0.
        counts: of the rows.
    """
    batch, rows, kv_heads, dim = held.key.shape
    sets = held.position.shape[1]
    if isinstance(bias, BiasOfValues):
        kind = (EXPONENTIAL if bias.is_exponential else SOFTPLUS).value
        line, states_bias, amplitude, _ = bias
        strides = (0, 0)
    else:
        kind, line, states_bias, amplitude = GIVEN.value, bias, None, bias
        strides = (bias.stride(0), bias.stride(1))
    key_batch, _, key_head, _ = key.stride()
    value_batch, _, value_head, _ = value.stride()
    other = amplitude if states_bias is None else states_bias
    added = amplitude.dtype, other.dtype
    dtypes = (key.dtype, value.dtype, held.bias.dtype, line.dtype, *added)
    sizes = rows, kv_heads, dim, sets, counts.keep_last, counts.keep_first
    _bind_insertion(kind, states_bias is not None, *sizes, dtypes).start(
        (batch * sets, 1, 1),
        (*held, key, value, line, amplitude, other, counter),
        (rows, key_batch, key_head, value_batch, value_head, *strides),
    )
    for written in held:  # autograd cannot see the kernel's writes
        increment_version(written)


@functools.lru_cache(maxsize=64)
def _bind_insertion(
    kind: int,
    has_states_bias: bool,
    rows: int,
    kv_heads: int,
    dim: int,
    sets: int,
    keep_last: int,
    keep_first: int,
    dtypes: tuple[torch.dtype, ...],
) -> BoundKernel:
    """Return the kernel for these sizes, and only for tensors of these dtypes."""
    del dtypes
    width = kv_heads // sets * dim
    return BoundKernel(
        insert,
        4 if rows <= 1024 else 8,
        KEY_BIAS=kind,
        HAS_STATES_BIAS=has_states_bias,
        VALUE_WIDTH=kv_heads * dim,
        BLOCK_VALUE=triton.next_power_of_2(kv_heads * dim),
        SETS=sets,
        DIM=dim,
        WIDTH=width,
        KEEP_LAST=keep_last,
        KEEP_FIRST=keep_first,
        BLOCK_ROWS=min(_MAX_ROWS_AT_ONCE, triton.next_power_of_2(rows)),
        BLOCK_WIDTH=triton.next_power_of_2(width),
    )
