# SPDX-License-Identifier: BSD-3-Clause
"""Bias and intervals of forget gates by the kernels of a pack, differentiable, and their operators.

A pack reads the gates once and writes all results, which takes PyTorch some forty operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import dispatch_state, loader
from .backends import select_backend
from .forgetting_formula import (
    Results,
    empty_results,
    least_gate,
    plain_gradient,
    plain_results,
)
from .operators import define, library, without_negation
from .refusals import refuse_double_backward

if TYPE_CHECKING:
    from .backends.pack import PackBackend

__all__ = ["forget", "serves"]

_INPUTS = "Tensor log_forget, Tensor? padding, Tensor? cu_seqlens, float? prune"


def serves(log_forget: Tensor) -> bool:
    """Say whether `forget` is to compute a call, which then has no torch.func transform."""
    if not (log_forget.is_cpu or log_forget.is_cuda):
        return False
    if dispatch_state.is_transformed() or dispatch_state.forward_mode_is_compiled():
        return False
    # Dynamo traces no question to a pack.
    return torch.compiler.is_compiling() or _serving_pack(log_forget.device) is not None


def forget(
    log_forget: Tensor, padding: Tensor | None, cu_seqlens: Tensor | None, prune: float | None
) -> Results:
    """Return what `plain_results` does, with one operator."""
    tensors = (log_forget, padding, cu_seqlens)
    if dispatch_state.is_idle(tensors):
        if not (log_forget.requires_grad and torch.is_grad_enabled()):
            return _forget(*tensors, prune)
        if not dispatch_state.is_below_autograd():
            results: Results = _Forget.apply(*tensors, prune)  # type: ignore[no-untyped-call]
            return results
    bias, start, end = torch.ops.flash_dmattn.forget.default(*tensors, prune)
    return bias, start, end


def _serving_pack(device: torch.device) -> PackBackend | None:
    try:
        chosen: Any = select_backend(device, "auto")
    except loader.NoPackError:
        return None
    return chosen if chosen.pack.forgets else None


def _forget(*arguments: Any) -> Results:
    log_forget, padding, cu_seqlens, prune = map(without_negation, arguments)
    pack = _serving_pack(log_forget.device)
    if pack is None:
        return plain_results(log_forget, padding, cu_seqlens, prune)
    results = bias, _, _ = empty_results(log_forget, prune)
    gates = (log_forget, padding, _contiguous(cu_seqlens))
    if prune is None:
        pack.forget((bias, None, None), gates, least_gate(prune), 0)
    else:
        pack.forget(results, gates, least_gate(prune), prune)
    return results


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
    gradient = torch.empty_like(log_forget)  # in the gates' order, as autograd keeps it
    gates = (log_forget, padding, _contiguous(cu_seqlens))
    pack.forget_backward(gradient, dbias, gates, least_gate(prune))
    return gradient


def _forget_backward_fake(dbias: Tensor, log_forget: Tensor, *arguments: Any) -> Tensor:
    return torch.empty_like(log_forget)


def _differentiated(
    ctx: Any, dbias: Tensor | None, backward: Callable[..., Tensor]
) -> tuple[Tensor | None, ...]:
    if dbias is None or not ctx.needs_input_grad[0]:
        return (None,) * 4
    if torch.is_grad_enabled():  # the gradient is to have a gradient itself
        backward = plain_gradient
    return backward(dbias, *ctx.saved_tensors, ctx.prune), None, None, None


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    *tensors, ctx.prune = inputs
    ctx.save_for_backward(*tensors)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    return _differentiated(ctx, gradients[0], torch.ops.flash_dmattn.forget_backward.default)


class _Forget(torch.autograd.Function):
    """The same without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Results:
        results = _forget(*arguments)
        _save_for_backward(ctx, arguments, results)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if dispatch_state.is_idle((gradients[0],)):
            return _differentiated(ctx, gradients[0], _forget_backward)
        return _differentiate(ctx, *gradients)


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
