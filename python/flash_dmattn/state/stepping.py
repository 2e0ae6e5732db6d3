# SPDX-License-Identifier: BSD-3-Clause
"""Insertion of one token in place: it is dropped, or replaces the worst row."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from .. import dispatch_state
from ..backends.triton import why_unavailable
from ..loader import FallbackWarning
from ..record import KeyCounts
from .rows import NOWHERE, Rows, narrowed


def insert(rows: Rows, new: Rows, counts: KeyCounts, counter: Tensor) -> None:
    """Write one token, later than all others, into rows of `kept_rows`.

    Args:
        rows: the held rows.
        new: the token.
        counts: of the rows that each head keeps.
        counter: int64 ``(3,)``, whose first number is the token's position and is incremented.
    """
    is_ranked = rows.sharing == 1 and rows.bias.dtype != torch.float64
    if is_ranked and has_kernel(rows.key.device.type):
        from .insert_kernel import launch_insert

        launch_insert(rows, *new[:3], counter, counts)
    else:
        insert_by_operations(rows, new, counts, counter)


@functools.cache
def _has_kernel(device_type: str) -> bool:
    if why_unavailable(device_type) is not None:
        return False
    if device_type == "cpu":  # Triton's interpreter
        return True
    from triton.runtime import driver

    # Triton compiles a launcher in C. A production machine may lack a compiler, Python's headers,
    # or a writable folder.
    try:
        driver.active.get_current_target()
    except Exception as error:  # PyTorch's operations compute the same, so any error is handled
        warnings.warn(
            f"Triton cannot start kernels on {device_type} devices, so PyTorch's operations do, "
            f"slower, what of DynamicMaskAttention and KeptKeys is not attention: {error}",
            FallbackWarning,
            stacklevel=2,
        )
        return False
    return True


def has_kernel(device_type: str) -> bool:
    """Say whether Triton can compute on a type of device, and torch.compile is not tracing.

    Compiled kernels that write into their arguments leave wrong rows (seen with torch 2.11 on a
    GPU). The compiler fuses the equivalent operations.
    """
    return not torch.compiler.is_compiling() and bool(_has_kernel(device_type))


def insert_by_operations(rows: Rows, new: Rows, counts: KeyCounts, counter: Tensor) -> None:
    """Do `insert` by PyTorch operations, also for heads that share rows.

    Of equal biases the earlier token is kept. So the new one must be better than the worst. The
    worst is the latest of those with the smallest bias, at any row. The host reads nothing, except
    on a CPU, without a synchronization, whether the token is dropped.
    """
    if counts.keeps_first_or_last:
        _insert_with_ends(rows, new, counts)
    else:
        _insert_ranked(rows, new, counts.window)
    counter[:1].add_(1)


def _insert_with_ends(rows: Rows, new: Rows, counts: KeyCounts) -> None:
    """Write a token, unless it is padding, over the oldest of the last ones. Move that one to the
    first tokens if these are not complete, else rank it among the best.
    """
    window, keep_last, keep_first = counts
    is_token = rows.by_set(new.bias != -torch.inf).any(2)
    if rows.sharing == 1:
        new = new._replace(bias=new.bias.masked_fill(new.bias.isnan(), -torch.inf))
    if keep_last:
        last = narrowed(rows, rows.size - keep_last, rows.size)
        is_empty = last.position == NOWHERE
        slot = last.position.masked_fill(is_empty, -1).argmin(-1, keepdim=True)
        evicted = last.take(slot)
        _write_row(last, slot, new, is_token)
        new, is_token = evicted, is_token & (evicted.position != NOWHERE)
    if keep_first:
        first = narrowed(rows, 0, keep_first)
        is_empty = first.position == NOWHERE
        fills_first = is_empty.any(-1, keepdim=True) & is_token
        _write_row(first, is_empty.to(torch.uint8).argmax(-1, keepdim=True), new, fills_first)
        is_token = is_token & ~fills_first
    new = new._replace(bias=new.bias.masked_fill(new.for_bias(~is_token), -torch.inf))
    if window:
        _insert_ranked(narrowed(rows, keep_first, rows.size - keep_last), new, window)


def _insert_ranked(rows: Rows, new: Rows, window: int) -> None:
    """Write a token into rows that hold the best of each head."""
    if rows.sharing == 1:
        slot, is_taken = _replace_worst(rows, new)
    else:
        slot, is_taken = _replace_worst_of_shared(rows, new, window)
    is_readable = is_taken.is_cpu and dispatch_state.is_idle((is_taken,))  # a read costs nothing
    if not is_readable or is_taken.any():
        _write_token(rows, slot, new, is_taken)


def _write_row(rows: Rows, slot: Tensor, new: Rows, is_written: Tensor) -> None:
    _write(rows.bias, 3, rows.for_bias(slot), new.bias, rows.for_bias(is_written))
    _write_token(rows, slot, new, is_written)


def _write_token(rows: Rows, slot: Tensor, new: Rows, is_written: Tensor) -> None:
    """Write all fields but the bias into a row of each set."""
    _write(rows.position, 2, slot, new.position, is_written)
    kv_heads, dim = rows.key.shape[2:]
    by_row, of_heads = (
        t.transpose(1, 2).expand(-1, 1, kv_heads).unsqueeze(-1).expand(-1, 1, kv_heads, dim)
        for t in (slot, is_written)
    )
    _write(rows.key, 1, by_row, new.key, of_heads)
    _write(rows.value, 1, by_row, new.value, of_heads)


def _replace_worst(rows: Rows, new: Rows) -> tuple[Tensor, Tensor]:
    """Write the bias, and return the replaced row of each set, and whether it is replaced.

    Empty rows have the smallest bias and the latest position.
    """
    least = rows.bias.amin(-1, keepdim=True)
    positions = rows.position.unsqueeze(2)
    worst = torch.where(rows.bias == least, positions, -1).argmax(-1, keepdim=True)
    is_better = new.bias > least  # False for NaN and -inf
    rows.bias.scatter_(-1, worst, torch.where(is_better, new.bias, least))
    return worst.squeeze(2), is_better.squeeze(2)


def _replace_worst_of_shared(rows: Rows, new: Rows, window: int) -> tuple[Tensor, Tensor]:
    """Do `_replace_worst` for heads that share rows, each of which keeps its own subset."""
    bias, new_bias = rows.by_set(rows.bias), rows.by_set(new.bias)
    is_held = bias > -torch.inf
    is_full = is_held.sum(-1, keepdim=True) >= window
    least = bias.masked_fill(~is_held, torch.inf).amin(-1, keepdim=True)
    is_least = is_held & (bias == least)
    worst = rows.position.unsqueeze(2).masked_fill(~is_least, -1).argmax(-1, keepdim=True)
    is_better = (new_bias > -torch.inf) & (~is_full | (new_bias > least))
    is_worst = torch.arange(rows.size, device=worst.device) == worst
    bias = bias.masked_fill(is_worst & is_full & is_better, -torch.inf)
    # Some row is kept by none of the heads: each keeps at most ``window`` rows, and those that take
    # the token have just dropped one.
    slot = (bias == -torch.inf).all(2).to(torch.uint8).argmax(-1, keepdim=True)
    is_slot = torch.arange(rows.size, device=slot.device) == slot
    bias = torch.where(is_slot.unsqueeze(2) & is_better, new_bias, bias)
    rows.bias.copy_(bias.view_as(rows.bias))
    return slot, is_better.any(2)


def _write(held: Tensor, dimension: int, index: Tensor, new: Tensor, is_written: Tensor) -> None:
    before = held.gather(dimension, index)
    held.scatter_(dimension, index, torch.where(is_written, new, before))
