# SPDX-License-Identifier: BSD-3-Clause
"""Arguments that every backend accepts, for tests that make one of them wrong."""

from __future__ import annotations

from typing import Any

import torch

from flash_dmattn import IntervalMask
from support import Target, randn

BOUNDS = torch.tensor([0, 4, 10], dtype=torch.int32)


def dense(target: Target, **changes: Any) -> dict[str, Any]:
    """Return valid arguments: B 2, Q 5, K 7, H 4, Hk 2, D 8."""
    arguments: dict[str, Any] = {
        "query": randn(2, 5, 4, 8),
        "key": randn(2, 7, 2, 8),
        "value": randn(2, 7, 2, 8),
        "backend": target.backend,
    }
    return arguments | changes


def varlen(target: Target, **changes: Any) -> dict[str, Any]:
    """Return valid arguments: two sequences of 4 and 6 rows."""
    arguments: dict[str, Any] = {
        "query": randn(10, 4, 8),
        "key": randn(10, 2, 8),
        "value": randn(10, 2, 8),
        "cu_seqlens_q": BOUNDS,
        "cu_seqlens_k": BOUNDS,
        "max_seqlen_q": 6,
        "max_seqlen_k": 6,
        "backend": target.backend,
    }
    return arguments | changes


def on_device(target: Target, arguments: dict[str, Any]) -> dict[str, Any]:
    dtype = target.dtypes[0]

    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
            value = value.to(dtype)
        if isinstance(value, (torch.Tensor, IntervalMask)) and value.device.type == "cpu":
            return value.to(target.device)
        return value

    return {name: convert(value) for name, value in arguments.items()}


def zeros(*shape: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def intervals(*shape: int) -> IntervalMask:
    return IntervalMask(zeros(*shape, dtype=torch.int32), zeros(*shape, dtype=torch.int32))
