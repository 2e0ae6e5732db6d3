# SPDX-License-Identifier: BSD-3-Clause
"""Differentiable attention over listed keys, and its operators."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flash_dmattn import dispatch_state, loader
from flash_dmattn.backends import select_backend
from flash_dmattn.backends.base import (
    first_columns,
    lse_shape,
    mass_shape,
    out_rest_bytes,
    out_shape,
)
from flash_dmattn.backends.shapes import MAX_HEAD_DIM, has_other_value_dim
from flash_dmattn.operators import define, library, without_negation
from flash_dmattn.ops import is_recorded, stop_if_recorded
from flash_dmattn.record import (
    KEY_LISTS,
    Gradients,
    KeyListInputs,
    no_gradient,
    without_gradients,
    without_values,
)
from flash_dmattn.reference import computing_dtype, recorded_gradients
from flash_dmattn.refusals import refuse_double_backward

from . import formula
from .checks import check_key_lists

if TYPE_CHECKING:
    from flash_dmattn.backends.base import Backend
    from flash_dmattn.backends.pack import PackBackend

__all__ = ["attention", "check_call", "key_mass", "serving_pack", "uses_triton"]

_INPUTS = f"{KEY_LISTS.text}, str backend"
_WANTED = ", ".join(f"bool need_d{name}" for name in KEY_LISTS.differentiable)
_GRADIENTS = ", ".join(f"Tensor d{name}" for name in KEY_LISTS.differentiable)
_FIELD_COUNT = len(KeyListInputs._fields)
_TENSOR_COUNT = KEY_LISTS.tensor_count


def attention(inputs: KeyListInputs, backend: str) -> tuple[Tensor, Tensor]:
    """Return out and lse, differentiable."""
    if _needs_one_head_dim(inputs, backend) and has_other_value_dim(inputs):
        from flash_dmattn.value_width import pad_to_one_head_dim

        out, lse = attention(pad_to_one_head_dim(inputs), backend)
        return first_columns(out, inputs.value.shape[-1]), lse
    stop_if_recorded(inputs, backend)
    if dispatch_state.is_transformed() or dispatch_state.forward_mode_is_compiled():
        # Plain operations support all torch transforms.
        check_call(inputs, backend)
        return formula.forward(inputs, recorded=True)
    # torch.jit.trace traces with and without gradients, and compares.
    keeps_rest = is_recorded(inputs[:_TENSOR_COUNT]) or dispatch_state.is_recorded_by_jit()
    operator = torch.ops.flash_dmattn.key_list_forward.default
    out, lse, _ = operator(*inputs, backend, keeps_rest)
    return out, lse


def key_mass(inputs: KeyListInputs, backend: str, lse: Tensor) -> Tensor:
    """Return the sum of each key's probabilities, without a gradient; lse is that of the call."""
    inputs = without_values(without_gradients(inputs))
    if dispatch_state.is_transformed():
        return formula.key_mass(inputs, recorded=True)
    mass: Tensor = torch.ops.flash_dmattn.key_list_mass.default(lse.detach(), *inputs, backend)
    return mass


def check_call(inputs: KeyListInputs, backend: str) -> None:
    """Raise the error, if any, that a call with these arguments raises."""
    check_key_lists(inputs)
    if backend != "auto":
        select_backend(inputs.query.device, backend)


def uses_triton(inputs: KeyListInputs, backend: str) -> bool:
    """Say whether Triton kernels compute a call. Their row sums have no fixed order."""
    return backend == "triton" and not inputs.deterministic and not _exceeds_max_head_dim(inputs)


def _needs_one_head_dim(inputs: KeyListInputs, backend: str) -> bool:
    if uses_triton(inputs, backend):
        return True
    # Dynamo cannot trace the query to a pack.
    if inputs.key.shape[-1] == inputs.value.shape[-1] or torch.compiler.is_compiling():
        return False
    return serving_pack(without_values(inputs), backend) is not None and not _exceeds_max_head_dim(
        inputs
    )


def _exceeds_max_head_dim(inputs: KeyListInputs) -> bool:
    return max(inputs.query.shape[-1], inputs.value.shape[-1]) > MAX_HEAD_DIM


def serving_pack(
    inputs: KeyListInputs, backend: str, *, backward: bool = False
) -> PackBackend | None:
    """Return the pack backend that computes a call, or its gradients; None if there is none."""
    chosen: Any = _backend_of_device(inputs.query.device, backend)
    if chosen is None or not chosen.serves_lists(inputs):
        return None
    is_unordered = backward and inputs.deterministic and not chosen.pack.orders_lists
    return None if is_unordered else chosen


def _backend_of_device(device: torch.device, backend: str) -> Backend | None:
    if backend not in ("auto", device.type):
        return None
    try:
        return select_backend(device, backend)
    except loader.NoPackError:
        return None


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *plain, backend, keeps_rest = map(without_negation, arguments)
    inputs = KeyListInputs(*plain)
    check_call(inputs, backend)
    rest_bytes = _rest_bytes(inputs, backend) if keeps_rest else 0
    # Zeroed, because equal calls of an operator give equal bytes.
    rest = torch.zeros(rest_bytes, dtype=torch.uint8, device=inputs.query.device)
    out_rest = rest if rest_bytes else None
    if uses_triton(inputs, backend):
        from flash_dmattn.backends.triton import key_lists

        return *key_lists.forward(inputs, out_rest), rest
    pack = serving_pack(inputs, backend)
    results = formula.forward(inputs) if pack is None else pack.list_forward(inputs, out_rest)
    return *results, rest


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *plain, backend, keeps_rest = arguments
    inputs = KeyListInputs(*plain)
    query, dtype = inputs.query, computing_dtype(inputs.query, inputs.bias)
    return (
        query.new_empty(out_shape(inputs)),
        query.new_empty(lse_shape(query), dtype=dtype),
        query.new_empty(_rest_bytes(inputs, backend) if keeps_rest else 0, dtype=torch.uint8),
    )


def _rest_bytes(inputs: KeyListInputs, backend: str) -> int:
    """Return the size of out's rounding residual, which kernels keep for the gradients."""
    call = inputs.without_lists()
    if uses_triton(inputs, backend):
        return out_rest_bytes(call)
    chosen = _backend_of_device(inputs.query.device, backend)
    return 0 if chosen is None else chosen.rest_bytes(call)


def _mass(*arguments: Any) -> Tensor:
    lse, *plain, backend = map(without_negation, arguments)
    inputs = KeyListInputs(*plain)
    check_call(inputs, backend)
    if uses_triton(inputs, backend):
        from flash_dmattn.backends.triton import key_lists

        return key_lists.key_mass(inputs, lse)
    return formula.key_mass(inputs)


def _mass_fake(lse: Tensor, *arguments: Any) -> Tensor:
    inputs = KeyListInputs(*arguments[:-1])
    return lse.new_empty(mass_shape(inputs.without_lists()), dtype=torch.float32)


def _backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, rest: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    *plain, backend = map(without_negation, arguments[: _FIELD_COUNT + 1])
    inputs = KeyListInputs(*plain)
    out_rest = rest if rest.numel() else None
    dout, dlse = without_negation(dout), without_negation(dlse)
    wanted = _wanted(inputs, arguments[_FIELD_COUNT + 1 :])
    if uses_triton(inputs, backend):
        from flash_dmattn.backends.triton import key_lists

        found = key_lists.backward(inputs, (dout, dlse, out, lse, out_rest), wanted)
        return _as_outputs(inputs, found)
    pack = serving_pack(inputs, backend, backward=True)
    if pack is None:
        found = formula.backward(inputs, dout, dlse, wanted)
    else:
        found = pack.list_backward(inputs, (dout, dlse, out, lse, out_rest), wanted)
    return _as_outputs(inputs, found)


def _backward_fake(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, rest: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    inputs = KeyListInputs(*arguments[:_FIELD_COUNT])
    wanted = _wanted(inputs, arguments[_FIELD_COUNT + 1 :])
    return _as_outputs(
        inputs, {name: (like := getattr(inputs, name)).new_empty(like.shape) for name in wanted}
    )


def _wanted(inputs: KeyListInputs, flags: Sequence[bool]) -> tuple[str, ...]:
    names = itertools.compress(KEY_LISTS.differentiable, flags)
    return tuple(name for name in names if getattr(inputs, name) is not None)


def _as_outputs(inputs: KeyListInputs, gradients: Gradients) -> tuple[Tensor, ...]:
    """Return the gradients as outputs of an operator: unwanted ones are empty tensors."""
    return tuple(
        gradients[name] if name in gradients else no_gradient(inputs, name)
        for name in KEY_LISTS.differentiable
    )


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *record, ctx.backend, ctx.keeps_rest = inputs
    ctx.save_for_backward(*record[:_TENSOR_COUNT], *output)
    ctx.settings = record[_TENSOR_COUNT:]
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any
) -> tuple[Tensor | None, ...]:
    *tensors, out, lse, rest = ctx.saved_tensors
    inputs = KeyListInputs(*tensors, *ctx.settings)
    flags = tuple(bool(ctx.needs_input_grad[position]) for position in KEY_LISTS.positions)
    gradients_of_fields: list[Tensor | None] = [None] * (_FIELD_COUNT + 2)
    if (dout is None and dlse is None) or not any(flags):
        return tuple(gradients_of_fields)
    if not ctx.keeps_rest and _rest_bytes(inputs, ctx.backend) > 0:
        # A graph that was traced without gradients is differentiated.
        forward = torch.ops.flash_dmattn.key_list_forward.default
        out, lse, rest = forward(*inputs, ctx.backend, True)
    if dout is None:
        dout = out.new_zeros(()).expand(out.shape)
    if ctx.backend == "reference" and torch.is_grad_enabled():
        found = _recorded(inputs, dout, dlse, _wanted(inputs, flags))
        gradients = tuple(map(found.get, KEY_LISTS.differentiable))
    else:
        gradients = torch.ops.flash_dmattn.key_list_backward.default(
            dout, dlse, out, lse, rest, *inputs, ctx.backend, *flags
        )
    for position, gradient, wanted in zip(KEY_LISTS.positions, gradients, flags, strict=True):
        gradients_of_fields[position] = gradient if wanted else None
    return tuple(gradients_of_fields)


def _recorded(
    inputs: KeyListInputs, dout: Tensor, dlse: Tensor | None, wanted: tuple[str, ...]
) -> Gradients:
    """Return gradients that are themselves differentiable."""

    def compute(tensors: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
        return formula.forward(inputs._replace(**tensors), recorded=True)  # type: ignore[arg-type]

    tensors = {name: getattr(inputs, name) for name in KEY_LISTS.differentiable}
    return recorded_gradients(tensors, compute, (dout, dlse), wanted)


define(
    "key_list_forward",
    (f"{_INPUTS}, bool keeps_rest", "(Tensor out, Tensor lse, Tensor rest)"),
    _forward,
    _forward_fake,
)
define(
    "key_list_backward",
    (
        f"Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor rest, {_INPUTS}, {_WANTED}",
        f"({_GRADIENTS})",
    ),
    _backward,
    _backward_fake,
)
define("key_list_mass", (f"Tensor lse, {_INPUTS}", "Tensor"), _mass, _mass_fake)
torch.library.register_autograd(
    "flash_dmattn::key_list_forward", _differentiate, setup_context=_save_for_backward, lib=library
)
torch.library.register_autograd(
    "flash_dmattn::key_list_backward", refuse_double_backward, lib=library
)
dispatch_state.watch_kernels(library)
