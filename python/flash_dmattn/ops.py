# SPDX-License-Identifier: BSD-3-Clause
"""Differentiable attention, and its operators."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from . import dispatch_state
from .arguments import MaskParts, any_autocast, mask_parts, resolved_deterministic
from .backends import select_backend
from .backends.base import Backend, first_columns, lse_dtype, lse_shape, mass_shape, out_shape
from .backends.reference import ReferenceBackend
from .backends.shapes import has_other_value_dim
from .checks import flag
from .masks import IntervalMask
from .operators import define, direct_apply, library, without_negation
from .record import (
    ATTENTION,
    AttentionInputs,
    KeyListInputs,
    MaskBlocks,
    no_gradient,
    without_gradients,
    without_values,
)
from .refusals import refuse_double_backward, refuse_forward_mode, refuse_vmap

__all__ = [
    "RECORDS_CALLS",
    "RecordedError",
    "attention",
    "is_recorded",
    "kept_gradients",
    "key_mass",
    "make_block_plan",
    "make_plan",
    "plans_blocks",
    "stop_if_recorded",
    "usual_attention",
    "with_shared_plan",
]

_INPUTS = f"{ATTENTION.text}, str backend"
_WANTED = ", ".join(f"bool need_d{name}" for name in ATTENTION.differentiable)
_GRADIENTS = ", ".join(f"Tensor d{name}" for name in ATTENTION.differentiable)
_FIELD_COUNT = len(AttentionInputs._fields)
_TENSOR_COUNT = ATTENTION.tensor_count
# The differentiable fields of a record.
_differentiable: Callable[[AttentionInputs], tuple[Tensor | None, ...]]
_differentiable = operator.itemgetter(*ATTENTION.positions)
# A gradient, or None, for each of them.
_Slots: TypeAlias = tuple[Tensor | None, ...]

_REFERENCE = ReferenceBackend()
_NO_MASK = MaskParts()


@cache
def _usual_call() -> Callable[..., Any] | None:
    """Return the core's reader of usual calls; None if the core fails to import.

    Other calls report that failure.
    """
    try:
        from ._core import usual_call
    except ImportError:
        return None
    return usual_call


# Whether attention calls raise RecordedError (recorder.py).
RECORDS_CALLS: ContextVar[bool] = ContextVar("flash_dmattn_records_calls", default=False)


class RecordedError(Exception):
    """The record of a call and the name of its backend."""

    def __init__(self, inputs: AttentionInputs | KeyListInputs, backend: str) -> None:
        """Store both."""
        super().__init__()
        self.inputs, self.backend = inputs, backend


def stop_if_recorded(inputs: AttentionInputs | KeyListInputs, backend: str) -> None:
    """Raise RecordedError within `recorded_calls`. Called if torch's dispatcher is not idle."""
    if not torch.compiler.is_compiling() and RECORDS_CALLS.get():
        raise RecordedError(inputs, backend)


def attention(
    inputs: AttentionInputs,
    backend: str,
    select: Callable[[AttentionInputs, str], AttentionInputs] | None = None,
    *,
    need_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return out and lse, both differentiable. lse may be None if it is not needed.

    Args:
        inputs, backend: of the call.
        select: returns a call with a mask in place of its window, if it has one.
        need_lse: whether lse is wanted.
    """
    if backend != "reference" and has_other_value_dim(inputs):
        from .value_width import pad_to_one_head_dim  # imported here: other calls do not need it

        if not _uses_narrow_values(inputs, backend):
            value_dim = inputs.value.shape[-1]
            out, lse = attention(pad_to_one_head_dim(inputs), backend, select, need_lse=need_lse)
            return first_columns(out, value_dim), lse
    if dispatch_state.is_idle(inputs[:_TENSOR_COUNT]):
        chosen = select_backend(inputs.query.device, backend)
        if inputs.window >= 0 and not chosen.selects():
            assert select is not None
            inputs = select(inputs, backend)
        differentiable = _differentiable(inputs)
        return _attention_of(
            chosen, backend, chosen.call(inputs), differentiable, need_lse=need_lse
        )
    stop_if_recorded(inputs, backend)
    if inputs.window >= 0:
        assert select is not None
        inputs = select(inputs, backend)
    if backend == "reference" and (
        dispatch_state.is_transformed() or dispatch_state.forward_mode_is_compiled()
    ):
        # Plain operations support all torch transforms.
        return _REFERENCE.forward(inputs)[:2]
    if dispatch_state.is_transformed():
        transformed: Any = _TransformedAttention
        out, lse, _ = transformed.apply(*inputs, backend, True)
        return out, lse
    if dispatch_state.forward_mode_is_compiled():
        refuse_forward_mode()
    # torch.jit.trace traces with and without gradients, and compares.
    keeps = is_recorded(inputs[:_TENSOR_COUNT]) or dispatch_state.is_recorded_by_jit()
    out, lse, _ = torch.ops.flash_dmattn.attention_forward.default(*inputs, backend, keeps)
    return out, lse


def _uses_narrow_values(inputs: AttentionInputs, backend: str) -> bool:
    from .value_width import serves_narrow_values

    widths = _narrow_widths(str(inputs.query.device), backend)
    return serves_narrow_values(inputs, widths, needs_backward=is_recorded(inputs[:_TENSOR_COUNT]))


def _narrow_widths(device: str, backend: str) -> tuple[int, int]:
    return select_backend(torch.device(device), backend).narrow_widths()


# The mark of torch.compiler.assume_constant_result, whose call would import torch._dynamo.
_narrow_widths._dynamo_marked_constant = True  # type: ignore[attr-defined]


def usual_attention(
    tensors: tuple[Any, ...],
    mask: Any,
    scale: float | None,
    causal: bool | None,
    softcap: float | None,
    counts: tuple[int | None, int, int],
    deterministic: bool | None,
    *,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None] | None:
    """Return the result of `attention` for arguments that a pack computes without further checks.

    Return None, without any computation, for other arguments.

    Args:
        tensors: query, key, value, bias and sink, as given by the caller.
        mask: of the call, or None.
        scale, causal, softcap, deterministic: of the call, as given by the caller.
        counts: its window_size, keep_last and keep_first.
    """
    parts, query_length = _NO_MASK, None
    if type(mask) is IntervalMask:
        parts, query_length = mask_parts(mask), mask.query_length
    elif mask is not None:
        parts = MaskParts(mask)
    all_tensors = tensors if mask is None else (*tensors, *parts[:3])
    if not dispatch_state.is_idle(all_tensors) or any_autocast():
        return None
    usual_call = _usual_call()
    if usual_call is None:
        return None
    is_deterministic = resolved_deterministic(deterministic)
    call = usual_call(*tensors, *parts, scale, causal, softcap, *counts, is_deterministic)
    if call is None or (query_length is not None and query_length != tensors[0].shape[1]):
        return None
    need_lse = flag("return_lse", return_lse)
    chosen = select_backend(tensors[0].device, "auto")
    if not chosen.selects():
        return None
    if tensors[0].shape[-1] != tensors[2].shape[-1]:
        inputs = AttentionInputs(*call.fields)
        if not (has_other_value_dim(inputs) and _uses_narrow_values(inputs, "auto")):
            return None
    return _attention_of(chosen, "auto", call, tensors, need_lse=need_lse)


def _attention_of(
    chosen: Backend,
    backend: str,
    call: Any,
    differentiable: tuple[Tensor | None, ...],
    *,
    need_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute a call in a backend's own form; ``differentiable`` are its differentiable fields."""
    if not is_recorded(differentiable) or dispatch_state.is_below_autograd():
        return chosen.attend(call, need_lse=need_lse)
    results = _apply(*differentiable, (call, backend, chosen, need_lse))
    return results if need_lse else (results, None)


def make_plan(inputs: AttentionInputs, backend: str) -> Tensor:
    """Return the plan of a call, for further calls with the same mask and sizes."""
    if dispatch_state.is_idle(inputs[:_TENSOR_COUNT]):
        return select_backend(inputs.query.device, backend).make_plan(inputs, zeroed=False)
    plan: Tensor = torch.ops.flash_dmattn.attention_plan.default(*inputs, backend)
    return plan


def make_block_plan(inputs: AttentionInputs, backend: str, blocks: MaskBlocks) -> Tensor:
    """Return the plan of a mask of blocks. `plans_blocks` says whether that is possible."""
    if RECORDS_CALLS.get():
        return inputs.query.new_empty(0, dtype=torch.uint8)
    chosen: Any = select_backend(inputs.query.device, backend)  # a PackBackend
    plan: Tensor = chosen.make_block_plan(inputs, blocks)
    return plan


def plans_blocks(query: Tensor, key: Tensor, backend: str) -> bool:
    """Say whether dense calls with a mask of blocks have a plan without a Q x K tensor.

    Code that is compiled, traced or observed by a mode does not: its operators take booleans.
    """
    is_recorded = not torch.compiler.is_compiling() and RECORDS_CALLS.get()
    return (
        (is_recorded or dispatch_state.is_idle((query, key), or_profiled=True))
        and query.dim() == key.dim() == 4
        and query.shape[1] > 1
        and min(query.numel(), key.numel()) > 0
        and select_backend(query.device, backend).plans_blocks()
    )


def booleans(blocks: MaskBlocks) -> Tensor:
    """Return a mask of blocks as booleans, uninitialized in a recorded call."""
    if not torch.compiler.is_compiling() and RECORDS_CALLS.get():
        return blocks.numbers.new_empty((), dtype=torch.bool).expand(blocks.shape)
    return blocks.to_bool()


def may_outlive_call(tensor: Tensor) -> bool:
    """Say whether a tensor is of no traced, recorded, transformed or captured code."""
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return dispatch_state.is_idle((tensor,), or_profiled=True)


def with_shared_plan(inputs: AttentionInputs, backend: str) -> AttentionInputs:
    """Return a call with its plan, if the forward pass and `key_mass` can read the same plan."""
    has_mask = inputs.mask is not None or inputs.start is not None
    if has_mask and inputs.given_plan is None and dispatch_state.is_idle(inputs[:_TENSOR_COUNT]):
        chosen = select_backend(inputs.query.device, backend)
        if chosen.key_mass_reads_plan(inputs):
            plan = chosen.make_plan(without_values(inputs), zeroed=False)
            return inputs._replace(given_plan=plan)
    return inputs


def key_mass(inputs: AttentionInputs, backend: str, lse: Tensor) -> Tensor:
    """Return the sum of each key's probabilities, without a gradient.

    Args:
        inputs, backend: of the call, which must not have a window.
        lse: of `attention`.
    """
    inputs, lse = without_values(without_gradients(inputs)), lse.detach()
    if dispatch_state.is_idle(inputs[:_TENSOR_COUNT]):
        return select_backend(inputs.query.device, backend).key_mass(inputs, lse)
    if backend == "reference" and dispatch_state.is_transformed():
        return _REFERENCE.key_mass(inputs, lse)
    mass: Tensor = torch.ops.flash_dmattn.key_mass.default(lse, *inputs, backend)
    return mass


def is_recorded(tensors: tuple[Any, ...]) -> bool:
    """Say whether autograd records an operation on any of these tensors or None."""
    if torch.is_grad_enabled():
        for tensor in tensors:  # any() of a generator takes three times as long
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def _plan(*arguments: Any) -> Tensor:
    *plain, backend = map(without_negation, arguments)
    inputs = AttentionInputs(*plain)
    return select_backend(inputs.query.device, backend).make_plan(inputs, zeroed=True)


def _plan_fake(*arguments: Any) -> Tensor:
    inputs = AttentionInputs(*arguments[:-1])
    plan_bytes = select_backend(inputs.query.device, arguments[-1]).plan_bytes(inputs)
    return inputs.query.new_empty(plan_bytes, dtype=torch.uint8)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, lse, and with ``keeps`` what else the backward pass needs, such as a new plan."""
    *plain, backend, keeps = map(without_negation, arguments)
    inputs = AttentionInputs(*plain)
    chosen = select_backend(inputs.query.device, backend)
    if not keeps:
        out, attended_lse = chosen.attend(chosen.call(inputs), need_lse=True)
        assert attended_lse is not None
        return out, attended_lse, _nothing_kept(inputs)
    out, lse, kept = chosen.forward(inputs, zeroed=True)
    return out, lse, _nothing_kept(inputs) if kept is None else kept


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *plain, backend, keeps = arguments
    inputs = AttentionInputs(*plain)
    query = inputs.query
    kept_bytes = select_backend(query.device, backend).kept_bytes(inputs) if keeps else 0
    return (
        query.new_empty(out_shape(inputs)),
        query.new_empty(lse_shape(query), dtype=lse_dtype(inputs)),
        query.new_empty(kept_bytes, dtype=torch.uint8),
    )


def _key_mass(*arguments: Any) -> Tensor:
    lse, *plain, backend = map(without_negation, arguments)
    inputs = AttentionInputs(*plain)
    return select_backend(inputs.query.device, backend).key_mass(inputs, lse)


def _key_mass_fake(lse: Tensor, *arguments: Any) -> Tensor:
    return lse.new_empty(mass_shape(AttentionInputs(*arguments[:-1])), dtype=torch.float32)


def _nothing_kept(inputs: AttentionInputs) -> Tensor:
    return inputs.query.new_empty(0, dtype=torch.uint8)


def _backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, plan: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    inputs = AttentionInputs(*map(without_negation, arguments[:_FIELD_COUNT]))
    flags = arguments[_FIELD_COUNT + 1 :]
    dout, dlse = without_negation(dout), without_negation(dlse)
    return _as_outputs(
        inputs, _gradients(inputs, arguments[_FIELD_COUNT], (dout, dlse, out, lse, plan), flags)
    )


def _backward_fake(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, plan: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    inputs = AttentionInputs(*arguments[:_FIELD_COUNT])
    differentiable, flags = _differentiable(inputs), arguments[_FIELD_COUNT + 1 :]
    return _as_outputs(
        inputs,
        tuple(
            like.new_empty(like.shape) if wanted and like is not None else None
            for like, wanted in zip(differentiable, flags, strict=True)
        ),
    )


def _as_outputs(inputs: AttentionInputs, gradients: _Slots) -> tuple[Tensor, ...]:
    """Return the gradients as outputs of an operator: unwanted ones are empty tensors.

    Each is a separate tensor, because outputs of an operator must not alias each other.
    """
    return tuple(
        no_gradient(inputs, name) if gradient is None else gradient
        for name, gradient in zip(ATTENTION.differentiable, gradients, strict=True)
    )


def _gradients(
    inputs: AttentionInputs,
    backend: str,
    results: tuple[Tensor | None, ...],
    flags: Sequence[bool],
) -> _Slots:
    """Run a backend's backward pass.

    Args:
        inputs, backend: of the call.
        results: the gradients of out and lse, out, lse, and the data that forward kept.
        flags: the wanted gradients. Flags of absent fields are ignored.
    """
    dout, dlse, *forward_results = results
    assert dout is not None
    differentiable = _differentiable(inputs)
    flags = tuple(f and t is not None for f, t in zip(flags, differentiable, strict=True))
    chosen = select_backend(inputs.query.device, backend)
    return chosen.differentiate(inputs, tuple(forward_results), flags, dout, dlse)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *record, ctx.backend, ctx.keeps = inputs
    ctx.save_for_backward(*record[:_TENSOR_COUNT], *output)
    ctx.settings = record[_TENSOR_COUNT:]
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any
) -> tuple[Tensor | None, ...]:
    flags = tuple(bool(ctx.needs_input_grad[position]) for position in ATTENTION.positions)
    saved = ctx.saved_tensors
    wants_gradients = any(flags) and not (dout is None and dlse is None)
    if not ctx.keeps and wants_gradients:  # the graph was traced without gradients
        tensors, forward = saved[:_TENSOR_COUNT], torch.ops.flash_dmattn.attention_forward.default
        saved = (*tensors, *forward(*tensors, *ctx.settings, ctx.backend, True))
    gradients = _saved_gradients(saved, ctx.settings, ctx.backend, flags, dout, dlse)
    gradients_of_fields: list[Tensor | None] = [None] * (_FIELD_COUNT + 2)
    for position, gradient in zip(ATTENTION.positions, gradients, strict=True):
        gradients_of_fields[position] = gradient
    return tuple(gradients_of_fields)


def _saved_gradients(
    saved: tuple[Any, ...],
    settings: Sequence[Any],
    backend: str,
    flags: tuple[bool, ...],
    dout: Tensor | None,
    dlse: Tensor | None,
) -> _Slots:
    """Return the gradients of the differentiable fields, None where a flag is False.

    Args:
        saved: the tensors of the call's record, then out, lse and other kept data.
        settings, backend: of the call.
        flags: the wanted gradients.
        dout, dlse: the gradients of out and lse, None for zeros.
    """
    if (dout is None and dlse is None) or not any(flags):
        return (None,) * len(flags)
    *tensors, out, lse, kept = saved
    if dout is None:
        dout = out.new_zeros(()).expand(out.shape)
    results = (dout, dlse, out, lse, kept)
    all_tensors = (*results, *tensors)
    inputs = AttentionInputs(*tensors, *settings)
    if backend == "reference" and is_recorded(all_tensors):
        wanted = tuple(itertools.compress(ATTENTION.differentiable, flags))
        gradients = _REFERENCE.recorded_backward(inputs, dout, dlse, wanted)
        return tuple(map(gradients.get, ATTENTION.differentiable))
    if dispatch_state.is_idle(all_tensors) and not is_recorded(all_tensors):
        return _gradients(inputs, backend, results, flags)
    differentiate: Callable[..., tuple[Tensor, ...]] = (
        _TransformedGradients.apply
        if dispatch_state.is_transformed()
        else torch.ops.flash_dmattn.attention_backward.default
    )
    kept = _nothing_kept(inputs) if kept is None else kept
    outputs = differentiate(dout, dlse, out, lse, kept, *inputs, backend, *flags)
    return tuple(g if wanted else None for g, wanted in zip(outputs, flags, strict=True))


def kept_gradients(
    call: tuple[Backend, str, Any],
    saved: tuple[Any, ...],
    flags: tuple[bool, ...],
    dout: Tensor | None,
    dlse: Tensor | None,
) -> _Slots:
    """Return the gradients of a call's differentiable fields, then None for each further flag.

    Args:
        call: a backend, its name in the call, and the second result of its `Backend.keep`.
        saved: the first result of its `Backend.keep`.
        flags: the wanted gradients.
        dout, dlse: the gradients of out and lse, None for zeros.
    """
    chosen, backend, kept = call
    if dout is not None and not torch.is_grad_enabled() and dispatch_state.is_idle((dout, dlse)):
        gradients: _Slots | None = chosen.resume(kept, saved, flags, dout, dlse)
        if gradients is not None:
            return gradients
    *tensors, out, lse, kept_data = saved
    settings = chosen.settings(kept)
    if lse is None:
        dtype = lse_dtype(AttentionInputs(*tensors, *settings))
        lse = kept.lse_within(kept_data, out, dtype)
        kept_data = None if kept_data is None else kept_data[: kept_data.numel() - lse.nbytes]
        saved = (*tensors, out, lse, kept_data)
    count = len(ATTENTION.differentiable)
    gradients = _saved_gradients(saved, settings, backend, flags[:count], dout, dlse)
    return (*gradients, *(None,) * (len(flags) - count))


class _Attention(torch.autograd.Function):
    """The autograd function of the operator, without a dispatcher call in forward and backward.

    Each argument and each result adds time to a small call. So the arguments are only the
    differentiable fields, which autograd tracks, and the whole call.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor | tuple[Tensor, Tensor]:
        call, backend, chosen, need_lse = arguments[-1]
        saved, kept = chosen.keep(call, need_lse=need_lse)
        ctx.save_for_backward(*saved)
        ctx.call = chosen, backend, kept
        ctx.set_materialize_grads(False)
        out: Tensor = saved[_TENSOR_COUNT]
        return (out, saved[_TENSOR_COUNT + 1]) if need_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any = None) -> tuple[Tensor | None, ...]:
        return kept_gradients(ctx.call, ctx.saved_tensors, ctx.needs_input_grad, dout, dlse)


_apply = direct_apply(_Attention)


class _TransformedAttention(torch.autograd.Function):
    """`_Attention` in the form that torch.func requires, which costs more per call."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        output: tuple[Tensor, Tensor, Tensor] = torch.ops.flash_dmattn.attention_forward.default(
            *arguments
        )
        return output

    setup_context = staticmethod(_save_for_backward)
    backward = staticmethod(_differentiate)
    jvp = staticmethod(refuse_forward_mode)
    vmap = staticmethod(refuse_vmap)


class _TransformedGradients(torch.autograd.Function):
    """The backward operator, which refuses transforms of its gradients."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        gradients: tuple[Tensor, ...] = torch.ops.flash_dmattn.attention_backward.default(
            *arguments
        )
        return gradients

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save nothing, because double backward is refused."""

    backward = staticmethod(refuse_double_backward)
    jvp = staticmethod(refuse_forward_mode)
    vmap = staticmethod(refuse_vmap)


define("attention_plan", (_INPUTS, "Tensor"), _plan, _plan_fake)
define(
    "attention_forward",
    (f"{_INPUTS}, bool keeps", "(Tensor out, Tensor lse, Tensor plan)"),
    _forward,
    _forward_fake,
)
define(
    "attention_backward",
    (
        f"Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor plan, {_INPUTS}, {_WANTED}",
        f"({_GRADIENTS})",
    ),
    _backward,
    _backward_fake,
)
define("key_mass", (f"Tensor lse, {_INPUTS}", "Tensor"), _key_mass, _key_mass_fake)
torch.library.register_autograd(
    "flash_dmattn::attention_forward",
    _differentiate,
    setup_context=_save_for_backward,
    lib=library,
)
torch.library.register_autograd(
    "flash_dmattn::attention_backward", refuse_double_backward, lib=library
)
dispatch_state.watch_kernels(library)
