# SPDX-License-Identifier: BSD-3-Clause
"""Shape and dtype rules for the backends that compute without a pack.

The core has the only copy of these rules. It gets sizes and strides, and the values of cu_seqlens
and block_table if they are to be checked. It gets no tensors, because these backends also take
tensors without readable memory, for example those of torch.func.
"""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor

from flash_dmattn.record import AttentionInputs, KeyListInputs, SelectionInputs

MAX_HEAD_DIM = 256
# Device types for the core, which reads values only of CPU tensors.
_READABLE, _NOT_READABLE = 1, 2
_WITH_VALUES = ("cu_seqlens_q", "cu_seqlens_k", "block_table")


def check_attention(
    inputs: AttentionInputs,
    *,
    read_lengths: bool = True,
    allows_other_value_dim: bool = False,
    max_head_dim: int = MAX_HEAD_DIM,
) -> None:
    """Raise TypeError or ValueError with the argument, its value and the allowed values.

    Args:
        inputs: of the call.
        read_lengths: if False, the values of the cu_seqlens are not checked, because they are on
            the device.
        allows_other_value_dim: whether value may have another head dimension than key.
        max_head_dim: upper bound for query and key, and with ``allows_other_value_dim`` for value.
    """
    _check(
        "check_attention",
        inputs,
        read_lengths,
        _head_dims_for_core(inputs, max_head_dim) if allows_other_value_dim else {},
    )


def _head_dims_for_core(inputs: AttentionInputs, max_head_dim: int) -> dict[str, int]:
    """Return the head dimensions to pass to the core instead of those that it does not support.

    It supports one head dimension for all tensors, of at most 256.
    """
    head_dims = {}
    of_query, of_key = inputs.query.shape[-1:], inputs.key.shape[-1:]
    if of_query == of_key and any(MAX_HEAD_DIM < size <= max_head_dim for size in of_key):
        head_dims = dict.fromkeys(("query", "key", "value"), MAX_HEAD_DIM)
    if has_other_value_dim(inputs, max_head_dim):
        head_dims["value"] = head_dims.get("key", inputs.key.shape[-1])
    return head_dims


def has_other_value_dim(
    inputs: AttentionInputs | KeyListInputs, max_head_dim: int = MAX_HEAD_DIM
) -> bool:
    """Say whether value differs from query and key in its head dimension only.

    Raises:
        ValueError: a head dimension is not from 1 to ``max_head_dim``.
    """
    key, value = inputs.key.shape, inputs.value.shape
    if key[-1:] == value[-1:] or key[-1:] != inputs.query.shape[-1:] or key[:-1] != value[:-1]:
        return False
    for name, shape in (("query", inputs.query.shape), ("value", value)):
        if not 1 <= shape[-1] <= max_head_dim:
            raise ValueError(
                f"{name} has shape {tuple(shape)}, but its head dimension must be from 1 to "
                f"{max_head_dim}"
            )
    return True


def check_selection(inputs: SelectionInputs, *, read_lengths: bool = True) -> None:
    """Raise TypeError or ValueError for arguments that selection does not support."""
    _check("check_selection", inputs, read_lengths)


def refuse_float64_bias(inputs: AttentionInputs, backend: str) -> None:
    """Raise NotImplementedError for a bias that a backend would round to float32."""
    bias, dtype = inputs.bias, torch.float64
    if bias is not None and bias.dtype == dtype and inputs.query.dtype != dtype:
        raise NotImplementedError(
            f"attn_bias has dtype {dtype}, which backend={backend!r} cannot read; convert it to "
            'float32, or pass backend="reference"'
        )


def _check(
    rule: str,
    inputs: AttentionInputs | SelectionInputs,
    read_lengths: bool,
    head_dims: dict[str, int] | None = None,
) -> None:
    try:
        from flash_dmattn import _core
    except ImportError:
        return  # the loader warns if the core is absent; torch's own errors must suffice
    if not _has_known_sizes(inputs):
        return
    # The core also takes dense masks and biases of fewer dimensions, but only for packs.
    rank = 3 if inputs.packed else 4
    for name, tensor in (("attn_mask", inputs.mask), ("attn_bias", inputs.bias)):
        if tensor is not None and tensor.dim() != rank:
            form = "(heads, queries, keys)" if inputs.packed else "(batch, heads, queries, keys)"
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, but must have {rank} dimensions {form}"
            )
    value_arrays: list[Any] = []  # keeps values alive while the core reads them
    fields = (
        _describe_tensor(
            name, field, value_arrays if read_lengths else None, (head_dims or {}).get(name)
        )
        if isinstance(field, Tensor)
        else field
        for name, field in zip(inputs._fields, inputs, strict=True)
    )
    getattr(_core, rule)(tuple(fields), _READABLE if read_lengths else _NOT_READABLE)


def _has_known_sizes(inputs: AttentionInputs | SelectionInputs) -> bool:
    """Say whether all sizes are numbers. Torch checks code with symbolic ones."""
    if torch.compiler.is_compiling():
        return False
    return not any(
        isinstance(size, torch.SymInt)
        for field in inputs
        for size in (field.shape if isinstance(field, Tensor) else (field,))
    )


def _describe_tensor(
    name: str, tensor: Tensor, value_arrays: list[Any] | None, head_dim: int | None
) -> tuple[Any, ...]:
    """Return the core's description of a tensor.

    Args:
        name, tensor: of the field.
        value_arrays: receives values that must live while the core reads; None if none are read.
        head_dim: size to pass in place of the last one, or None.
    """
    shape, strides, address = tuple(tensor.shape), tensor.stride(), None
    if head_dim is not None:
        shape = (*shape[:-1], head_dim)
    if value_arrays is not None and name in _WITH_VALUES and tensor.dtype == torch.int32:
        values = array("i", tensor.flatten().tolist() or [0])
        value_arrays.append(values)
        address = values.buffer_info()[0]
        if name == "block_table" and len(shape) == 2:
            strides = (shape[1], 1)
    device = _NOT_READABLE if value_arrays is None else _READABLE
    return (address, str(tensor.dtype).removeprefix("torch."), shape, strides, device, 0)
