# SPDX-License-Identifier: BSD-3-Clause
"""Forgetting attention: weights decay by learned gates, applied as a bias for each key.

With log forget gates g_l <= 0 and their cumulated sum F_i = g_0 + ... + g_i, the score of query i
and key j <= i gets F_i - F_j, the sum of the gates between them (FoX, arXiv:2503.02130). F_i is
the same for all keys of a row, so -F_j is a per-key bias. Keys that have decayed below a threshold
can be dropped (arXiv:2504.06949): one interval of queries then keeps each key.
"""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor

from . import checks, dispatch_state, forgetting_ops
from .arguments import resolved_deterministic, scale_of
from .forgetting_formula import bias_for_backend, plain_results
from .interface import flash_dmattn_func
from .mask_checks import check_token_mask
from .masks import IntervalMask, mark_runs
from .wrong_keywords import hide_unknown_keywords, refuse_keywords

__all__ = [
    "check_gates",
    "check_log_forget",
    "checked_prune",
    "forgetting_attention",
    "forgetting_bias",
    "pruning_threshold",
]


@hide_unknown_keywords
def forgetting_bias(
    log_forget: Tensor,
    prune: float | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    padding: Tensor | None = None,
    **unknown: NoReturn,
) -> tuple[Tensor, IntervalMask | None]:
    """Return the bias of forget gates, and the mask that drops decayed keys.

    They are ``attn_bias`` and ``attn_mask`` of causal self-attention, Q = K = N. Query i then adds
    the sum of the gates j + 1 to i to the score of key j.

    Args:
        log_forget: ``(B, {H|Hk}, N)``, logarithms of forget gates, at most 0; packed
            ``({H|Hk}, total)``. -inf forgets all earlier keys.
        prune: at most 0. Drop a key for a query if the gates between them sum to less than this;
            `pruning_threshold` gives a harmless value. A gate below ``prune - 1`` counts as
            ``prune - 1`` and gets no gradient. None keeps all keys; -inf then counts as -1000.
        cu_seqlens: int32 ``(sequences + 1,)``: 0, then where each packed sequence ends. Gates act
            within a sequence.
        padding: bool ``(B, N)``, True is a token. Padding does not decay earlier keys, and its keys
            are not kept.

    Returns:
        The bias, float64 ``(B, {H|Hk}, 1, N)``, packed ``({H|Hk}, 1, total)``, differentiable with
        respect to the gates; and an `IntervalMask`, or None without prune.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape or a device does not fit, or prune is above 0; or, with prune, a gate
            is above 0, which is checked on CPUs only.
    """
    if unknown:
        refuse_keywords(forgetting_bias, unknown)
    prune = _check_arguments(log_forget, prune, cu_seqlens, padding)
    return _bias_and_mask(log_forget, prune, cu_seqlens, padding)


def forgetting_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    prune: float | None,
    *,
    padding: Tensor | None = None,
    softmax_scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Return causal self-attention with the bias and the mask of `forgetting_bias`.

    Args:
        query, key, value: tensors ``(B, N, heads, D)`` on the device of the gates.
        log_forget, prune, padding: as in `forgetting_bias`.
        softmax_scale, backend: as in `flash_dmattn_func`.
    """
    prune = _check_arguments(log_forget, prune, None, padding)
    # The separate functions handle errors, casts and padding.
    is_usual = (
        backend is None
        and query.dtype == key.dtype == value.dtype != torch.float64
        and query.shape[-1] == value.shape[-1]
    )
    if is_usual:
        found = forgetting_ops.attend(
            (query, key, value, log_forget),
            padding,
            prune,
            scale_of(softmax_scale, query),
            deterministic=resolved_deterministic(None),
        )
        if found is not None:
            return found
    bias, mask = _bias_and_mask(log_forget, prune, None, padding)
    bias = bias_for_backend(backend, bias)
    out = flash_dmattn_func(
        query, key, value, mask, bias, softmax_scale, is_causal=True, backend=backend
    )
    assert isinstance(out, Tensor)
    return out


def _check_arguments(
    log_forget: Tensor, prune: float | None, cu_seqlens: Tensor | None, padding: Tensor | None
) -> float | None:
    """Check all arguments, and return the pruning threshold."""
    check_log_forget(log_forget, cu_seqlens, padding)
    prune = checked_prune(prune)
    if prune is not None:
        check_gates(log_forget)
    return prune


def _bias_and_mask(
    log_forget: Tensor, prune: float | None, cu_seqlens: Tensor | None, padding: Tensor | None
) -> tuple[Tensor, IntervalMask | None]:
    compute = forgetting_ops.forget if forgetting_ops.serves(log_forget) else plain_results
    bias, start, end = compute(log_forget, padding, cu_seqlens, prune)
    if prune is None:
        return bias, None
    length = log_forget.shape[-1] if cu_seqlens is None else None
    # Later keys decay later, so each query keeps one run of keys. Only padding interrupts it.
    return bias, mark_runs(IntervalMask(start, end, query_length=length))


def pruning_threshold(score_bound: float, length: int, *, error: float = 1e-4) -> float:
    """Return the largest ``prune`` that is harmless for scores of a given bound.

    A row that drops keys decayed below it drops at most the fraction ``error`` of its weights: each
    of ``length`` keys weighs at most ``exp(score_bound + prune)``, and the query's own key, which
    has not decayed, at least ``exp(-score_bound)``. So the output changes by at most ``2 * error``
    times the largest value.

    Args:
        score_bound: upper bound of the absolute scaled scores ``|scale * q.k|``. After an RMS norm
            of query and key, without rotation, it is ``scale * D * max|w_q * w_k|``, with the
            norms' weights w.
        length: number of keys that a query sees.
        error: between 0 and 1.

    Returns:
        ``log(error) - log(length) - 2 * score_bound``.

    Raises:
        TypeError: an argument is not a number.
        ValueError: a number is outside of its range.
    """
    bound, error = checks.number("score_bound", score_bound, ""), checks.number("error", error, "")
    length = checks.index("length", length, 1)
    if not 0 <= bound < math.inf:
        raise ValueError(f"score_bound must be at least 0 and finite, got {bound}")
    if not 0 < error < 1:
        raise ValueError(f"error must be above 0 and below 1, got {error}")
    return math.log(error) - math.log(length) - 2 * bound


def checked_prune(prune: float | None) -> float | None:
    """Check and return a threshold of log decay."""
    if prune is None:
        return None
    threshold = checks.number("prune", prune)
    if not -math.inf < threshold <= 0:
        raise ValueError(
            f"prune must be a finite log decay of at most 0, such as -16.0, or None to keep all "
            f"keys, got {threshold}"
        )
    return threshold


def check_log_forget(log_forget: Tensor, cu_seqlens: Tensor | None, padding: Tensor | None) -> None:
    """Raise TypeError or ValueError as documented by `forgetting_bias`."""
    checks.tensor("log_forget", log_forget)
    if not log_forget.is_floating_point() or log_forget.element_size() < 2:
        raise TypeError(
            "log_forget must have a floating-point dtype of at least 16 bits, got "
            f"{log_forget.dtype}"
        )
    form = "(B, H, N)" if cu_seqlens is None else "(H, total) with cu_seqlens"
    if log_forget.dim() != (3 if cu_seqlens is None else 2):
        raise ValueError(f"log_forget must have shape {form}, got {tuple(log_forget.shape)}")
    if cu_seqlens is not None:
        _check_bounds(cu_seqlens, log_forget.shape[1])
    if padding is not None:
        _check_padding(padding, log_forget, cu_seqlens)
    for name, tensor in (("cu_seqlens", cu_seqlens), ("padding", padding)):
        if tensor is not None and tensor.device != log_forget.device:
            raise ValueError(
                f"{name} must be on log_forget's device {log_forget.device}, got a tensor on "
                f"{tensor.device}"
            )


def _check_bounds(cu_seqlens: Tensor, total: int) -> None:
    checks.cu_seqlens("cu_seqlens", cu_seqlens)
    if not dispatch_state.is_checkable(cu_seqlens):
        return
    values = cu_seqlens.tolist()
    if values[0] != 0 or values[-1] != total or values != sorted(values):
        raise ValueError(
            f"cu_seqlens must rise from 0 to {total}, the tokens of log_forget, got "
            f"{values[0]} to {values[-1]}"
        )


def _check_padding(padding: Tensor, log_forget: Tensor, cu_seqlens: Tensor | None) -> None:
    check_token_mask(padding, cu_seqlens)
    batch, _, length = log_forget.shape
    if tuple(padding.shape) != (batch, length):
        raise ValueError(
            f"padding must have log_forget's shape (B, N) = ({batch}, {length}), got "
            f"{tuple(padding.shape)}"
        )


def check_gates(log_forget: Tensor) -> None:
    """Raise ValueError if a gate is above 0. Only gates on a CPU are checked."""
    if not dispatch_state.is_checkable(log_forget):
        return
    if bool((log_forget > 0).any()):
        raise ValueError(
            "log_forget must be at most 0 where keys are pruned, being the logarithm of what is "
            f"left, got {float(log_forget.detach().max())}; logsigmoid makes such gates"
        )
