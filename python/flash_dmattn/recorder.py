# SPDX-License-Identifier: BSD-3-Clause
"""Recording of a call's inputs instead of its computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .ops import RECORDS_CALLS
from .record import SelectionInputs


@contextmanager
def recorded_calls() -> Iterator[list[SelectionInputs]]:
    """Let attention calls of this thread raise RecordedError, without any computation.

    Operations before the error that make tensors make uninitialized ones. Yields the list of inputs
    that `select_keep` has received.
    """
    token = RECORDS_CALLS.set(True)
    try:
        # Under a dispatch mode no call bypasses the dispatcher.
        with _EmptyTensors() as mode:
            yield mode.selections
    finally:
        RECORDS_CALLS.reset(token)


class _EmptyTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces operations that make tensors; operations that only inspect tensors run unchanged."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.selections: list[SelectionInputs] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.flash_dmattn.select_keep.default:
            self.selections.append(SelectionInputs(*args[:-1]))
        return _replacements().get(func, func)(*args, **(kwargs or {}))


@cache
def _replacements() -> dict[Any, Callable[..., Any]]:
    from . import blocks, selection_ops

    aten, ours = torch.ops.aten, torch.ops.flash_dmattn
    return {
        ours.select_intervals.default: selection_ops._select_intervals_fake,
        ours.select_keep.default: selection_ops._select_keep_fake,
        ours.block_keys.default: blocks._keys_fake,
        ours.block_keep.default: blocks._keep_fake,
        ours.block_numbers.default: blocks._numbers_fake,
        ours.block_keep_alone.default: blocks._keep_alone_fake,
        aten._to_copy.default: _cast_nothing,
        aten.arange.default: _arange,
        aten.clamp.default: _clamp,
        aten.constant_pad_nd.default: _pad,
        aten.index_select.default: _index_select,
        aten.nan_to_num.default: _empty_like,
        aten.new_zeros.default: aten.new_empty.default,
    }


def _cast_nothing(tensor: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return torch.empty_like(tensor, dtype=dtype)


def _pad(tensor: Tensor, pads: list[int], *_: Any) -> Tensor:
    assert len(pads) == 2
    return tensor.new_empty((*tensor.shape[:-1], tensor.shape[-1] + sum(pads)))


def _index_select(tensor: Tensor, dimension: int, index: Tensor) -> Tensor:
    shape = list(tensor.shape)
    shape[dimension] = index.numel()
    return tensor.new_empty(shape)


# These keep the values of a block_table on CPUs, where the values are checked.


def _arange(end: int, **options: Any) -> Tensor:
    device = torch.device(options.get("device") or "cpu")
    make = torch.arange if device.type == "cpu" else torch.empty
    return make(end, **options)


def _clamp(tensor: Tensor, *limits: Any) -> Tensor:
    return tensor.clamp(*limits) if tensor.is_cpu else torch.empty_like(tensor)


def _empty_like(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(tensor)
