# SPDX-License-Identifier: BSD-3-Clause
"""Checks of the arguments of mask constructors."""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks
from .checks import MAX_ROWS


def checked_length(name: str, length: int) -> int:
    """Check and return a number of queries or keys."""
    return checks.index(name, length, 0, MAX_ROWS)


def checked_side(name: str, side: int | None) -> int | None:
    """Check and return the reach of a window to one side; None means no limit."""
    if side is None:
        return None
    side = checks.index(name, side)
    if side < 0:
        raise ValueError(f"{name} must be at least 0, or None for no limit, got {side}")
    # A side longer than any sequence is no limit. The clamp prevents overflow of sums with it.
    return side if torch.compiler.is_compiling() else min(side, MAX_ROWS)


def last_bound(cu_seqlens: Tensor) -> int:
    """Return the last value of cu_seqlens, which is the total length."""
    if cu_seqlens.shape[0] == 0:
        raise ValueError("cu_seqlens must have a last value unless length is given, got shape (0,)")
    checks.check_values("cu_seqlens", cu_seqlens, "; pass length")
    return checks.index(
        "the last value of cu_seqlens", checks.value_of(cu_seqlens[-1]), 0, MAX_ROWS
    )


def check_integers(name: str, tensor: Tensor, dimensions: int, shape: str) -> None:
    """Raise unless a tensor holds integers and has the given number of dimensions."""
    checks.tensor(name, tensor, "a torch.Tensor of integers")
    if tensor.dtype not in checks.INTEGERS:
        raise TypeError(f"{name} must hold integers, got {tensor.dtype}")
    if tensor.dim() != dimensions:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")


def check_token_mask(padding: Tensor, cu_seqlens: Tensor | None) -> None:
    """Raise unless padding is boolean, and sequences are not packed."""
    if cu_seqlens is not None:
        raise ValueError("padding must be None with cu_seqlens: packed sequences have none")
    if checks.tensor("padding", padding, "a boolean torch.Tensor or None").dtype != torch.bool:
        raise TypeError(
            f"padding must have dtype torch.bool (True is a token), got {padding.dtype}"
        )
