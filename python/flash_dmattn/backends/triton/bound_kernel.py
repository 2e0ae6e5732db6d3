# SPDX-License-Identifier: BSD-3-Clause
"""Launches of compiled kernels that bypass Triton's lookup."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ..torch_memory import raw_stream
from .launch import on_device

# From this version a compiled kernel takes all arguments of its function, including constants.
# Checked with 3.6 and 3.9. Older versions always use Triton's lookup.
_STARTS_COMPILED = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)
# Triton compiles separate kernels for addresses that are multiples of this.
_ALIGNMENT = 16
# Triton passes integers from this value as 64-bit.
_MIN_INT64 = 1 << 31


class BoundKernel:
    """A kernel with its constants, launched without Triton's lookup of the compiled kernel.

    The lookup by the kinds of all arguments takes the host 20 to 30 us. In a decoding step that is
    more than all kernels take. So every call must have tensors of the same dtypes, and numbers that
    Triton does not specialize.
    """

    def __init__(self, kernel: Any, warps: int, **constants: Any) -> None:
        """Take the kernel's last parameters, in order, and the number of warps per program."""
        assert list(constants) == list(kernel.arg_names[-len(constants) :])
        self._kernel = kernel
        self._options = {**constants, "num_warps": warps}
        self._constants = tuple(constants.values())
        self._compiled: dict[int, Any] = {}  # by device index

    def start(
        self, grid: tuple[int, int, int], tensors: tuple[Tensor, ...], numbers: tuple[float, ...]
    ) -> None:
        """Launch a grid of programs on the current stream of the tensors' device."""
        is_unspecialized = max(numbers) < _MIN_INT64
        for tensor in tensors:
            if tensor.data_ptr() % _ALIGNMENT:
                is_unspecialized = False
        device = tensors[0].device
        # Only CUDA devices have a current device and stream here.
        index = -1 if device.type != "cuda" or device.index is None else device.index
        compiled = self._compiled.get(index)
        if compiled is not None and is_unspecialized and torch.cuda.current_device() == index:
            compiled[grid](*tensors, *numbers, *self._constants, stream=raw_stream(index))
            return
        with on_device(device):
            compiled = self._kernel[grid](*tensors, *numbers, **self._options)
        if is_unspecialized and index >= 0 and _STARTS_COMPILED:
            self._compiled[index] = compiled
