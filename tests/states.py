# SPDX-License-Identifier: BSD-3-Clause
"""Layers, tokens and caches for tests of kept keys between calls."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_dmattn import AttentionCache, DynamicMaskAttention


def tokens(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return key, value and bias."""
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, 1, count, 2, 8, generator=generator)
    return key, value, torch.randn(1, 2, 1, count, generator=generator)


def make_layer(**settings: Any) -> DynamicMaskAttention:
    torch.manual_seed(0)
    settings = {"window_size": 6, "keep_last": 0, **settings}
    layer = DynamicMaskAttention(32, 4, 2, **settings)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return layer


def states(count: int, seed: int = 0) -> Tensor:
    return torch.randn(2, count, 32, generator=torch.Generator().manual_seed(seed))


def torch_saved(value: object, *, weights_only: bool = False) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


CACHES: dict[str, Callable[[], AttentionCache]] = {
    "window": AttentionCache,
    "rollback": lambda: AttentionCache(rollback=2),
    "all, growing": lambda: AttentionCache(every_key=True),
    "all, preallocated": lambda: AttentionCache(40, every_key=True),
}
