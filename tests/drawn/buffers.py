# SPDX-License-Identifier: BSD-3-Clause
"""Buffers for packs: filled with NaN before a call, and surrounded by guard bytes."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flash_dmattn.backends import pack, torch_memory
from support import core_without_allocator

POISON = 0xFF  # every byte: NaN in each floating dtype, and -1
GUARD = 1024  # bytes; a multiple of every alignment that a kernel may need


class PoisonedTorch:
    """Replaces torch in the packs' backend: its new tensors are poisoned."""

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *size: Any, dtype: torch.dtype, device: Any) -> Tensor:
        sizes = tuple(size[0]) if size and not isinstance(size[0], int) else size
        used = math.prod(sizes) * dtype.itemsize
        padded = -(-used // GUARD) * GUARD
        block = torch.full((padded + 2 * GUARD,), POISON, dtype=torch.uint8, device=device)
        self.blocks.append(block[GUARD : GUARD + used])
        return block[GUARD : GUARD + used].view(dtype).view(sizes)

    zeros = empty

    def empty_like(
        self, like: Tensor, *, memory_format: torch.memory_format = torch.preserve_format
    ) -> Tensor:
        assert memory_format == torch.contiguous_format or like.is_contiguous()
        return self.empty(*like.shape, dtype=like.dtype, device=like.device)

    def frombuffer(self, pages: mmap.mmap, *, dtype: torch.dtype) -> Tensor:
        return self.empty(len(pages), dtype=dtype, device="cpu")

    def holds(self, tensor: Tensor) -> bool:
        return any(block.data_ptr() == tensor.data_ptr() for block in self.blocks)

    def guards_are_whole(self) -> bool:
        for used in self.blocks:
            block = torch.empty(0, dtype=torch.uint8, device=used.device)
            block = block.set_(used.untyped_storage())
            before, after = block[:GUARD], block[GUARD + used.numel() :]
            if not ((before == POISON).all() and (after == POISON).all()):
                return False
        return True


@contextlib.contextmanager
def poisoned_buffers() -> Iterator[PoisonedTorch]:
    """Let the packs' backend allocate poisoned memory."""
    poisoned = PoisonedTorch()
    with (
        core_without_allocator(),
        mock.patch.object(pack, "torch", poisoned),
        mock.patch.object(torch_memory, "torch", poisoned),
    ):
        yield poisoned
