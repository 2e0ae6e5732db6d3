# SPDX-License-Identifier: BSD-3-Clause
"""Plans, workspaces and results that hold NaN before a call, and bytes around them that no call may
write.
"""

from __future__ import annotations

import math
import mmap
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_dmattn import dynamic_mask
from flash_dmattn.backends import pack
from support import HALF_TYPES, Target

from .calls import assert_same_bits
from .kinds import KINDS, Draw

POISON = 0xFF  # of every byte: NaN in each floating dtype, and -1
GUARD = 1024  # bytes; a multiple of every alignment that a kernel might want


class PoisonedTorch:
    """What flash_dmattn.backends.pack takes for torch: its new tensors are poisoned."""

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


@pytest.fixture
def poisoned() -> PoisonedTorch:
    """The allocator of the buffers of packs, once `take` has been called with it."""
    return PoisonedTorch()


def take(poisoned: PoisonedTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "torch", poisoned)
    # The core would get scratch memory from torch itself.
    monkeypatch.setattr(pack, "_CORE_READS_TENSORS", False)


def test_results_do_not_depend_on_what_buffers_hold(
    kind: str, poisoned: PoisonedTorch, pack_target: Target, seed: int, monkeypatch: Any
) -> None:
    call = KINDS[kind](Draw(seed, HALF_TYPES[seed % 2])).to(pack_target.device)
    want = call.results(deterministic=True)
    take(poisoned, monkeypatch)
    got = call.results(deterministic=True)
    # Otherwise the poison has gone elsewhere.
    assert all(poisoned.holds(got[name]) for name in got if name != "dbias")
    # Without mask and gradients, as paged keys are here, nothing but out and lse is written.
    assert kind == "paged" or len(poisoned.blocks) > len(got), "no plan and no workspace among them"
    assert_same_bits(got, want)
    assert poisoned.guards_are_whole(), "bytes beside a buffer have been written"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [False, True])
def test_selections_do_not_depend_on_what_buffers_hold(
    rows: bool,
    causal: bool,
    poisoned: PoisonedTorch,
    pack_target: Target,
    seed: int,
    monkeypatch: Any,
) -> None:
    draw = Draw(seed, torch.bfloat16)
    queries, keys = draw.size(1, 70), draw.size(1, 3000)
    bias = draw.randn(2, 3, queries if rows else 1, keys).to(pack_target.device)
    arguments = (bias, draw.size(0, 600), causal)
    want = dynamic_mask(*arguments, query_length=queries, key_length=keys)
    take(poisoned, monkeypatch)
    got = dynamic_mask(*arguments, query_length=queries, key_length=keys)
    results = [got] if isinstance(got, Tensor) else [got.start, got.end]
    assert all(poisoned.holds(result) for result in results)
    assert torch.equal(*(m if isinstance(m, Tensor) else m.to_bool(queries) for m in (got, want)))
    assert poisoned.guards_are_whole(), "bytes beside a buffer have been written"
