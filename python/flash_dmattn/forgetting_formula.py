# SPDX-License-Identifier: BSD-3-Clause
"""The formula of forget gates in PyTorch operations, which support all torch transforms."""

from __future__ import annotations

import torch
from torch import Tensor

from .arguments import backend_name
from .backends import portable
from .loader import environment
from .masks import IntervalMask, mark_runs

__all__ = [
    "Results",
    "bias_for_backend",
    "bounded_gates",
    "decay_mask",
    "empty_results",
    "first_decayed_row",
    "min_gate",
    "plain_gradient",
    "plain_results",
]

# The bias, start and end. start and end are empty without pruning.
Results = tuple[Tensor, Tensor, Tensor]
# The value of a -inf gate without pruning. No score can compensate for it.
_MIN_GATE_WITHOUT_PRUNING = -1000.0
# Gates in a chunk of `running_sums`.
_CHUNK_GATES = 128


def plain_results(
    log_forget: Tensor, padding: Tensor | None, cu_seqlens: Tensor | None, prune: float | None
) -> Results:
    """Return the bias, with gradients, and the start and end for `forgetting_bias`."""
    tokens = _token_mask(padding)
    total = running_sums(bounded_gates(log_forget, prune, tokens))
    within = None if cu_seqlens is None else _bounds_of_tokens(cu_seqlens, total.shape[-1])
    sums = total
    if within is not None:
        before = torch.nn.functional.pad(total, (1, 0))
        sums = total - before.gather(-1, within[0].expand_as(total))
    bias = -sums if tokens is None else (-sums).masked_fill(~tokens, -torch.inf)
    bias = bias.unsqueeze(-2)
    if prune is None:
        return bias, *empty_results(log_forget, prune)[1:]
    return bias, *_intervals(total.detach(), prune, within, tokens)


def plain_gradient(
    dbias: Tensor,
    log_forget: Tensor,
    padding: Tensor | None,
    cu_seqlens: Tensor | None,
    prune: float | None,
) -> Tensor:
    """Return the gradient of the gates. It is differentiable with respect to dbias."""
    tokens = _token_mask(padding)
    dsums = dbias.squeeze(-2).to(torch.float64)
    if tokens is not None:
        dsums = dsums.masked_fill(~tokens, 0)
    sums = running_sums(dsums.flip(-1)).flip(-1)
    if cu_seqlens is not None:
        _, past = _bounds_of_tokens(cu_seqlens, dsums.shape[-1])
        after = torch.nn.functional.pad(sums, (0, 1))
        sums = sums - after.gather(-1, past.expand_as(sums))
    has_gradient = log_forget >= min_gate(prune)
    if tokens is not None:
        has_gradient = has_gradient & tokens
    return torch.where(has_gradient, -sums, 0).to(log_forget.dtype)


def empty_results(log_forget: Tensor, prune: float | None) -> Results:
    """Return uninitialized tensors for the results of `plain_results`."""
    shape, device = log_forget.shape, log_forget.device
    bias = torch.empty((*shape[:-1], 1, shape[-1]), dtype=torch.float64, device=device)
    start = torch.empty((0,) if prune is None else shape, dtype=torch.int32, device=device)
    return bias, start, torch.empty_like(start)


def min_gate(prune: float | None) -> float:
    """Return the least gate. Smaller gates count as it."""
    return _MIN_GATE_WITHOUT_PRUNING if prune is None else prune - 1


def bias_for_backend(backend: str | None, bias: Tensor) -> Tensor:
    """Return a float64 bias in a dtype that a backend reads: float32 for portable backends."""
    name = backend_name(backend)
    chosen = _default_backend() if name == "auto" else name
    return bias.float() if chosen in portable.NAMES else bias


def _default_backend() -> str:
    return environment.get("FLASH_DMATTN_BACKEND")


# The mark of torch.compiler.assume_constant_result, whose call would import torch._dynamo.
_default_backend._dynamo_marked_constant = True  # type: ignore[attr-defined]


def bounded_gates(log_forget: Tensor, prune: float | None, tokens: Tensor | None) -> Tensor:
    """Return gates in float64 that can be summed: finite, and 0 at padding."""
    gates = log_forget.to(torch.float64)
    # clamp gives a gate at the bound its gradient only before torch 2.14.
    gates = gates.masked_fill(gates < min_gate(prune), min_gate(prune))
    return gates if tokens is None else gates.masked_fill(~tokens, 0)


def running_sums(gates: Tensor) -> Tensor:
    """Return the cumulated sums along the last dimension.

    Chunks are summed first, because cumsum runs one thread block per row on a GPU, and there are
    few rows.
    """
    length = gates.shape[-1]
    if length < 2 * _CHUNK_GATES:
        return gates.cumsum(-1)
    padded = torch.nn.functional.pad(gates, (0, -length % _CHUNK_GATES))
    within = padded.reshape(*gates.shape[:-1], -1, _CHUNK_GATES).cumsum(-1)
    before = torch.nn.functional.pad(within[..., :-1, -1].cumsum(-1), (1, 0))
    return (within + before.unsqueeze(-1)).flatten(-2)[..., :length]


def first_decayed_row(rows: Tensor, keys: Tensor, prune: float) -> Tensor:
    """Return the first row, int64, for which each key has decayed below a threshold.

    Args:
        rows: ``(..., rows)``, the gates' sum at each row. It never rises.
        keys: ``(..., keys)``, the gates' sum at each key; inf for a key that no row keeps.
        prune: the threshold.
    """
    return torch.searchsorted((-rows).contiguous(), (-prune - keys).contiguous(), right=True)


def decay_mask(
    rows: Tensor, keys: Tensor, prune: float | None, capacity: int | None = None
) -> IntervalMask:
    """Return the mask of causal queries whose tokens are the last keys.

    Args:
        rows, keys: as in `first_decayed_row`, without gradients.
        prune: the threshold, or None.
        capacity: most keys that a query sees, including its own; or None.
    """
    count = rows.shape[-1]
    row = torch.arange(keys.shape[-1], device=keys.device) - (keys.shape[-1] - count)
    end = torch.full_like(row, count).expand_as(keys)
    if prune is not None:
        end = first_decayed_row(rows, keys, prune)
    if capacity is not None:
        end = torch.minimum(end, row + capacity)
    start = row.clamp(min=0).to(torch.int32).expand_as(end).contiguous()
    end = end.clamp(min=0).to(torch.int32)
    return mark_runs(IntervalMask(start, end, query_length=count))


def _intervals(
    total: Tensor, prune: float, within: tuple[Tensor, Tensor] | None, tokens: Tensor | None
) -> tuple[Tensor, Tensor]:
    length = total.shape[-1]
    start = torch.arange(length, device=total.device)
    end = first_decayed_row(total, total, prune)
    if within is not None:
        begin, past = within
        start, end = start - begin, torch.minimum(end, past) - begin
    if tokens is not None:
        end = end.masked_fill(~tokens, 0)
    return start.to(torch.int32).expand_as(end).contiguous(), end.to(torch.int32)


def _bounds_of_tokens(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return two int64 ``(total,)``: the begin and the end of each token's sequence."""
    # On devices other than a CPU bounds are not checked, so clamp them against reads out of bounds.
    bounds = cu_seqlens.to(torch.int64).clamp(0, total)
    token = torch.arange(total, device=cu_seqlens.device)
    after = torch.searchsorted(bounds, token, right=True).clamp(1, max(len(bounds) - 1, 1))
    return bounds[after - 1], bounds[after.clamp(max=len(bounds) - 1)]


def _token_mask(padding: Tensor | None) -> Tensor | None:
    """Return padding as ``(..., 1, N)``, which broadcasts over the heads."""
    return None if padding is None else padding.unsqueeze(-2)
