# SPDX-License-Identifier: BSD-3-Clause
"""Block sizes and kernel launches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources


class Tiles(NamedTuple):
    """The block of scores of one step, and how it is computed."""

    block_rows: int
    block_keys: int
    warps: int
    stages: int

    @property
    def constants(self) -> dict[str, int]:
        """The constants of the kernels that compute scores."""
        return {
            "BLOCK_ROWS": self.block_rows,
            "BLOCK_KEYS": self.block_keys,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


# Tiles by pass and by the most bytes of a vector of D elements: from the fastest on an H200 (bf16,
# causal top-w) to those that fit the smallest shared memory.
_TILES: dict[str, dict[int, tuple[Tiles, ...]]] = {
    "forward": {
        128: (Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 1)),
        256: (Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1)),
        512: (Tiles(64, 32, 8, 2), Tiles(32, 32, 4, 1), Tiles(16, 16, 4, 1)),
        1024: (Tiles(32, 32, 8, 1), Tiles(16, 16, 4, 1)),
    },
    "rows": {
        128: (Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 1)),
        256: (Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1)),
        512: (Tiles(64, 32, 8, 2), Tiles(32, 32, 4, 1), Tiles(16, 16, 4, 1)),
        1024: (Tiles(32, 32, 8, 1), Tiles(16, 16, 4, 1)),
    },
    "keys": {
        128: (Tiles(32, 64, 4, 2), Tiles(32, 64, 4, 1)),
        256: (Tiles(32, 64, 4, 2), Tiles(32, 64, 4, 1), Tiles(32, 32, 4, 1)),
        512: (Tiles(32, 64, 8, 2), Tiles(32, 32, 4, 1), Tiles(16, 16, 4, 1)),
        1024: (Tiles(32, 32, 8, 1), Tiles(16, 16, 4, 1)),
    },
    # For the key mass; not measured.
    "mass": {
        128: (Tiles(64, 128, 8, 3), Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 1)),
        256: (Tiles(64, 128, 8, 3), Tiles(64, 64, 4, 2), Tiles(32, 32, 4, 1)),
        512: (Tiles(64, 64, 8, 2), Tiles(32, 32, 4, 1), Tiles(16, 16, 4, 1)),
        1024: (Tiles(32, 32, 8, 1), Tiles(16, 16, 4, 1)),
    },
    # For key lists, whose rows are the heads of a group; not measured.
    "list_forward": {
        256: (Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1)),
        512: (Tiles(64, 32, 8, 2), Tiles(32, 32, 4, 1), Tiles(16, 16, 4, 1)),
        1024: (Tiles(32, 32, 8, 1), Tiles(16, 16, 4, 1)),
    },
    "list_mass": {
        256: (Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1)),
        512: (Tiles(64, 32, 8, 2), Tiles(32, 32, 4, 1), Tiles(16, 16, 4, 1)),
        1024: (Tiles(32, 32, 8, 1), Tiles(16, 16, 4, 1)),
    },
    "list_backward": {
        256: (Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1)),
        512: (Tiles(32, 32, 8, 1), Tiles(16, 16, 4, 1)),
        1024: (Tiles(16, 16, 4, 1),),
    },
}
# For kernels over key blocks, whose run times vary widely.
_PROGRAMS_PER_SM = 8
_MAX_ROW_PARTS = 8
# The number of leading tiles of a choice that do not fit a device.
_too_large: dict[tuple[object, ...], int] = {}


def tiles_of(name: str, vector_bytes: int) -> tuple[Tiles, ...]:
    """Return the tiles to try for a pass, in order of preference."""
    return next(tiles for limit, tiles in _TILES[name].items() if vector_bytes <= limit)


def launch(kernel: Any, programs: int, arguments: dict[str, Any], **constants: Any) -> None:
    """Launch a kernel with those of the given arguments that it takes."""
    if programs:
        chosen = {name: arguments[name] for name in kernel.arg_names if name in arguments}
        kernel[(programs,)](**chosen, **constants)


def fitting(name: str, query: Tensor, block_d: int, start: Callable[[Tiles], None]) -> None:
    """Call ``start`` with a pass's first tiles that fit the device's shared memory."""
    choices = tiles_of(name, block_d * query.itemsize)
    key = (name, query.dtype, query.device, block_d)
    first = _too_large.get(key, 0)
    for number, tiles in enumerate(choices[first:], first):
        try:
            start(tiles)
        except OutOfResources:
            if number + 1 == len(choices):
                raise
        else:
            _too_large[key] = number
            return


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that makes a device current, because Triton launches kernels there."""
    if device.type == "cpu":
        return nullcontext()
    current: AbstractContextManager[object] = getattr(torch, device.type).device(device)
    return current


def blocks(length: int, block: int) -> int:
    """Return the number of blocks that cover a length."""
    return int(triton.cdiv(length, block))


@functools.cache
def sm_count(device: torch.device) -> int:
    """Return a GPU's number of SMs, which run as many programs of many warps concurrently."""
    if device.type == "cpu":
        return 1
    properties = getattr(torch, device.type).get_device_properties(device)
    # Intel's name for the unit with its own shared memory.
    count = "gpu_subslice_count" if device.type == "xpu" else "multi_processor_count"
    return int(getattr(properties, count))


def busy_programs(device: torch.device) -> int:
    """Return the number of programs over key blocks that keeps a device busy."""
    return _PROGRAMS_PER_SM * sm_count(device)


def row_parts(programs: int, device: torch.device) -> int:
    """Return the number of parts into which programs divide their rows to keep a device busy."""
    parts = 1
    while parts < _MAX_ROW_PARTS and programs * parts < busy_programs(device):
        parts *= 2
    return parts
