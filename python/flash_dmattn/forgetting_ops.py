# SPDX-License-Identifier: BSD-3-Clause
"""Bias and intervals of forget gates by the kernels of a pack, with autograd and operators.

A pack reads the gates once and writes all results. PyTorch needs about forty operations for this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from . import dispatch_state, loader
from .arguments import any_autocast
from .backends import select_backend
from .forgetting_formula import (
    Results,
    empty_results,
    min_gate,
    plain_gradient,
    plain_results,
)
from .operators import define, direct_apply, library, without_negation
from .ops import is_recorded, kept_gradients
from .record import ATTENTION, AttentionInputs
from .refusals import refuse_double_backward

if TYPE_CHECKING:
    from .backends.pack import PackBackend

__all__ = ["attend", "forget", "serves"]

_INPUTS = "Tensor log_forget, Tensor? padding, Tensor? cu_seqlens, float? prune"
# The gates, their padding and the bounds of packed sequences.
_Gates: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None]


def serves(log_forget: Tensor) -> bool:
    """Say whether `forget` computes a call. The call then has no torch.func transform."""
    if not (log_forget.is_cpu or log_forget.is_cuda):
        return False
    if dispatch_state.is_transformed() or dispatch_state.forward_mode_is_compiled():
        return False
    # Dynamo cannot trace the query to a pack.
    return torch.compiler.is_compiling() or _serving_pack(log_forget.device) is not None


def forget(
    log_forget: Tensor, padding: Tensor | None, cu_seqlens: Tensor | None, prune: float | None
) -> Results:
    """Return the results of `plain_results` by one operator."""
    tensors = (log_forget, padding, cu_seqlens)
    if dispatch_state.is_idle(tensors):
        if not is_recorded((log_forget,)):
            return _forget(*tensors, prune)
        if not dispatch_state.is_below_autograd():
            results: Results = _apply(*tensors, prune)
            return results
    bias, start, end = torch.ops.flash_dmattn.forget.default(*tensors, prune)
    return bias, start, end


def attend(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    padding: Tensor | None,
    prune: float | None,
    scale: float,
    *,
    deterministic: bool,
) -> Tensor | None:
    """Return the causal attention of a dense call with forget gates, in one autograd step.

    Return None, without any computation, if the gates must be computed separately.
    Args:
        tensors: query, key, value and the gates.
        padding, prune: as in `forget`.
        scale, deterministic: of the call.
    """
    if not dispatch_state.is_idle((*tensors, padding)) or any_autocast():
        return None
    pack = _serving_pack(tensors[3].device)
    if pack is None:
        return None
    settings = (pack, padding, prune, scale, deterministic)
    if is_recorded(tensors) and not dispatch_state.is_below_autograd():
        out: Tensor = _apply_attention(*tensors, settings)
        return out
    return pack.attend(_call(*tensors, settings), need_lse=False)[0]


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    settings: tuple[PackBackend, Tensor | None, float | None, float, bool],
) -> Any:
    """Compute the bias and the intervals, and return a call of the attention."""
    pack, padding, prune, scale, deterministic = settings
    bias, start, end = _results(pack, (log_forget, padding, None), prune)
    is_pruned = prune is not None
    return pack.call(
        AttentionInputs(
            query,
            key,
            value,
            None,
            start if is_pruned else None,
            end if is_pruned else None,
            bias,
            scale=scale,
            causal=True,
            deterministic=deterministic,
            keeps_runs=is_pruned,
        )
    )


def _serving_pack(device: torch.device) -> PackBackend | None:
    try:
        chosen: Any = select_backend(device, "auto")
    except loader.NoPackError:
        return None
    return chosen if chosen.forgets() else None


def _results(pack: PackBackend, gates: _Gates, prune: float | None) -> Results:
    results = empty_results(gates[0], prune)
    written = (results[0], None, None) if prune is None else results
    pack.forget(written, gates, min_gate(prune), prune or 0.0)
    return results


def _forget(*arguments: Any) -> Results:
    log_forget, padding, cu_seqlens, prune = map(without_negation, arguments)
    pack = _serving_pack(log_forget.device)
    if pack is None:
        return plain_results(log_forget, padding, cu_seqlens, prune)
    return _results(pack, (log_forget, padding, _contiguous(cu_seqlens)), prune)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _forget_fake(
    log_forget: Tensor, padding: Tensor | None, cu_seqlens: Tensor | None, prune: float | None
) -> Results:
    return empty_results(log_forget, prune)


def _forget_backward(dbias: Tensor, *arguments: Any) -> Tensor:
    log_forget, padding, cu_seqlens, prune = map(without_negation, arguments)
    dbias, pack = without_negation(dbias), _serving_pack(log_forget.device)
    if pack is None:
        plain = plain_gradient(dbias, log_forget, padding, cu_seqlens, prune)
        return torch.empty_like(log_forget).copy_(plain)
    gradient = torch.empty_like(log_forget)  # in the gates' memory layout, which autograd keeps
    gates = (log_forget, padding, _contiguous(cu_seqlens))
    pack.forget_backward(gradient, dbias, gates, min_gate(prune))
    return gradient


def _forget_backward_fake(dbias: Tensor, log_forget: Tensor, *arguments: Any) -> Tensor:
    return torch.empty_like(log_forget)


def _gradient(dbias: Tensor, gates: _Gates, prune: float | None) -> Tensor:
    """Return the gradient of the gates by the path that the dispatcher state requires."""
    backward: Callable[..., Tensor] = torch.ops.flash_dmattn.forget_backward.default
    if torch.is_grad_enabled():  # double backward
        backward = plain_gradient
    elif dispatch_state.is_idle((dbias, *gates)):
        backward = _forget_backward
    return backward(dbias, *gates, prune)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    *tensors, ctx.prune = inputs
    ctx.save_for_backward(*tensors)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dbias: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dbias is None or not ctx.needs_input_grad[0]:
        return (None,) * 4
    return _gradient(dbias, ctx.saved_tensors, ctx.prune), None, None, None


class _Forget(torch.autograd.Function):
    """`forget` without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Results:
        results = _forget(*arguments)
        _save_for_backward(ctx, arguments, results)
        return results

    backward = staticmethod(_differentiate)


class _ForgettingAttention(torch.autograd.Function):
    """Attention with the bias and the mask of its gates, which stay internal."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        log_forget, (pack, padding, prune, *_) = arguments[3:]
        saved, kept = pack.keep(_call(*arguments), need_lse=False)
        ctx.save_for_backward(*saved, log_forget, padding)
        ctx.call, ctx.prune = (pack, "auto", kept), prune
        ctx.set_materialize_grads(False)
        out: Tensor = saved[ATTENTION.tensor_count]
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        *saved, log_forget, padding = ctx.saved_tensors
        # Flags of query, key, value and bias. The gates need their gradient through the bias.
        flags = ctx.needs_input_grad[:4]
        gradients = kept_gradients(ctx.call, tuple(saved), (*flags, False), dout, None)
        dquery, dkey, dvalue, dbias, _ = gradients
        dgates = None if dbias is None else _gradient(dbias, (log_forget, padding, None), ctx.prune)
        return dquery, dkey, dvalue, dgates, None


_apply, _apply_attention = map(direct_apply, (_Forget, _ForgettingAttention))

define("forget", (_INPUTS, "(Tensor bias, Tensor start, Tensor end)"), _forget, _forget_fake)
define(
    "forget_backward",
    (f"Tensor dbias, {_INPUTS}", "Tensor"),
    _forget_backward,
    _forget_backward_fake,
)
torch.library.register_autograd(
    "flash_dmattn::forget", _differentiate, setup_context=_save_for_backward, lib=library
)
torch.library.register_autograd(
    "flash_dmattn::forget_backward", refuse_double_backward, lib=library
)
dispatch_state.watch_kernels(library)
