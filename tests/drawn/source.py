# SPDX-License-Identifier: BSD-3-Clause
"""Random choices and numbers from one integer, equal on every machine."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Source:
    """The source of a problem: choices by Python's generator, values by PyTorch's CPU generator."""

    def __init__(self, seed: int) -> None:
        self.choices = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def chance(self, probability: float) -> bool:
        return self.choices.random() < probability

    def integer(self, least: int, most: int) -> int:
        return self.choices.randint(least, most)

    def choice(self, of: Sequence[T]) -> T:
        return self.choices.choice(of)

    def weighted(self, weights: Mapping[T, float]) -> T:
        return self.choices.choices(list(weights), list(weights.values()))[0]

    def some(self, of: Sequence[T]) -> list[T]:
        """Choose an ordered subset, possibly empty or complete."""
        return [one for one in of if self.chance(0.5)]

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def kept(self, shape: Sequence[int], density: float) -> Tensor:
        return torch.rand(tuple(shape), generator=self.generator) < density

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.int32)

    def permutation(self, count: int) -> list[int]:
        order: list[int] = torch.randperm(count, generator=self.generator).tolist()
        return order


def strided(source: Source, tensor: Tensor) -> Tensor:
    """Give the same values other strides and alignment, surrounded by NaN or similar values."""
    dense = {"dense": 3.0, "sliced": 1.0, "stepped": 0.5, "permuted": 1.0, "offset": 1.0}
    kind = source.weighted(dense)
    if kind == "dense" or tensor.dim() == 0 or tensor.numel() == 0:
        return tensor
    if kind == "permuted":
        order = list(range(tensor.dim()))
        source.choices.shuffle(order)
        inverse = sorted(range(tensor.dim()), key=order.__getitem__)
        return tensor.permute(order).contiguous().permute(inverse)
    if kind == "offset":
        before = source.integer(1, 9)
        base = surroundings(tensor, (before + tensor.numel(),))
        return base[before:].view(tensor.shape).copy_(tensor)
    steps = [1] * tensor.dim()
    if kind == "stepped":
        steps[source.integer(0, tensor.dim() - 1)] = 2
    before = [source.choice([0, 0, 1, 3]) for _ in steps]
    after = [source.choice([0, 0, 1, 8]) for _ in steps]
    sizes = [
        first + size * step + last
        for first, size, step, last in zip(before, tensor.shape, steps, after, strict=True)
    ]
    where = tuple(
        slice(first, first + size * step, step)
        for first, size, step in zip(before, tensor.shape, steps, strict=True)
    )
    return surroundings(tensor, sizes)[where].copy_(tensor)


def surroundings(like: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return memory for a view; its elements outside of the view must not affect any result."""
    if like.dtype.is_floating_point:
        return like.new_full(tuple(sizes), math.nan)
    return like.new_full(tuple(sizes), True if like.dtype == torch.bool else 7)


def bytes_of(mask: Tensor) -> Tensor:
    """Return a boolean tensor's bytes, which may differ from 0 and 1."""
    return mask.view(torch.uint8)


def truth_of(mask: Any) -> Any:
    """Return a boolean tensor with bytes 0 and 1; other tensors are unchanged."""
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        return bytes_of(mask).ne(0)
    return mask
