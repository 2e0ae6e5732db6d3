# SPDX-License-Identifier: BSD-3-Clause
"""Calls of the core in memory that torch allocates.

They serve torch before 2.10, whose tensors the core cannot read, and calls whose rows kernels
cannot read: of those they copy query, key, value, and in the backward pass out and dout, with zeros
up to the next head dimension that kernels can read. They also serve calls whose allocation fails in
the core, so that torch raises its own error.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from flash_dmattn import _core
from flash_dmattn.record import (
    ATTENTION,
    AttentionInputs,
    Gradients,
    KeyListInputs,
    MaskBlocks,
    SelectionInputs,
)

from .base import (
    first_columns,
    has_readable_rows,
    lse_dtype,
    lse_shape,
    mass_shape,
    out_shape,
)

__all__ = [
    "CORE_READS_TENSORS",
    "attend",
    "backward",
    "computed_gradients",
    "copies_rows",
    "forget",
    "forget_backward",
    "keep",
    "key_mass",
    "list_backward",
    "list_forward",
    "make_block_plan",
    "make_plan",
    "raw_stream",
    "select",
    "to_core",
]

# torch >= 2.10: the core reads the tensor itself, which is much faster.
CORE_READS_TENSORS = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
# From this size mapping pages costs less than writing zeros.
_PAGED_BYTES = 1 << 17
_DLPACK_DEVICES = {"cpu": 1, "cuda": 2}

_Inputs = TypeVar("_Inputs", AttentionInputs, KeyListInputs)


def make_plan(pack: _core.Pack, threads: int, inputs: AttentionInputs, *, zeroed: bool) -> Tensor:
    """Convert the mask to columns."""
    problem, device = _problem(pack, threads, inputs), inputs.query.device
    size = problem.plan_bytes
    plan = (_zeros if zeroed else _bytes)(size, device)
    if size:
        workspace = _scratch(problem.plan_workspace_bytes, device)
        problem.plan(to_core(plan), to_core(workspace))
    return plan


def make_block_plan(
    pack: _core.Pack, threads: int, inputs: AttentionInputs, blocks: MaskBlocks
) -> Tensor:
    """Convert a mask of blocks to columns."""
    problem = _problem(pack, threads, inputs)
    numbers, contents = map(to_core, (blocks.numbers, blocks.contents))
    problem.take_blocks(numbers, contents, blocks.kept, blocks.partial)
    plan = _bytes(problem.plan_bytes, inputs.query.device)
    problem.plan(to_core(plan), None)
    return plan


def attend(
    pack: _core.Pack, threads: int, inputs: AttentionInputs, *, need_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute `_core.Call.attend` in memory that torch allocates."""
    columns, plan = inputs.value.shape[-1], inputs.given_plan
    problem, inputs = _readable_problem(_problem, pack, threads, inputs, for_backward=False)
    out, lse = _out(inputs), _lse(inputs) if need_lse else None
    scratch = _scratch(problem.attend_bytes(need_lse, plan is not None), out.device)
    problem.attend(to_core(out), to_core(lse), to_core(plan), to_core(scratch))
    return first_columns(out, columns), lse


def keep(
    pack: _core.Pack, threads: int, inputs: AttentionInputs, *, zeroed: int | None = None
) -> tuple[Tensor | None, ...]:
    """Compute keep of `_core.Call`, with a separate lse.

    Args:
        pack, threads, inputs: of the call.
        zeroed: size in bytes of the kept data, which is zeroed first. None: as needed.
    """
    tensors: tuple[Any, ...] = inputs[: ATTENTION.tensor_count]
    columns, plan = inputs.value.shape[-1], inputs.given_plan
    problem, inputs = _readable_problem(_problem, pack, threads, inputs, for_backward=True)
    out, lse = _out(inputs), _lse(inputs)
    if zeroed is None:
        kept = _scratch(problem.kept_bytes(True, plan is not None), out.device)
    else:
        kept = _zeros(zeroed, out.device)
    work = problem.forward_workspace_bytes
    if plan is None:
        work = max(work, problem.plan_workspace_bytes)
    arguments = (out, lse, plan, kept, _scratch(work, out.device))
    problem.keep(*map(to_core, arguments))
    return (*tensors, first_columns(out, columns), lse, kept)


def backward(
    pack: _core.Pack,
    threads: int,
    inputs: AttentionInputs,
    operands: tuple[Tensor | None, ...],
    wanted: tuple[str, ...],
) -> Gradients:
    """Return the gradients of the wanted fields.

    Args:
        pack, threads, inputs: of the call.
        operands: the gradients of out and lse, then out, lse and the other kept data.
        wanted: names of fields.
    """
    wanted = computed_gradients(inputs, wanted)
    return _differentiate(_problem, pack, threads, inputs, operands, wanted, inputs.given_plan)


def computed_gradients(inputs: AttentionInputs, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Return the gradients to compute for the wanted ones.

    With narrow values one kernel computes those of query, key and value together.
    """
    if inputs.value.shape[-1] == inputs.key.shape[-1]:
        return wanted
    return tuple(dict.fromkeys((*wanted, "query", "key", "value")))


def key_mass(pack: _core.Pack, threads: int, inputs: AttentionInputs, lse: Tensor) -> Tensor:
    """Return the sum of each key's probabilities."""
    problem, inputs = _readable_problem(_problem, pack, threads, inputs, for_backward=True)
    device, plan = lse.device, inputs.given_plan
    if plan is None and problem.plan_bytes:
        plan = make_plan(pack, threads, inputs, zeroed=False)
    mass = torch.empty(mass_shape(inputs), dtype=torch.float32, device=device)
    workspace = _scratch(problem.key_mass_workspace_bytes, device)
    problem.key_mass(*map(to_core, (mass, lse, plan, workspace)))
    return mass


def list_forward(
    pack: _core.Pack, threads: int, inputs: KeyListInputs, out_rest: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return out and lse of a call that lists the keys of each query, and write out_rest."""
    columns, keeps = inputs.value.shape[-1], out_rest is not None
    problem, inputs = _readable_problem(_list_problem, pack, threads, inputs, for_backward=keeps)
    call = inputs.without_lists()
    out, lse = _out(call), _lse(call)
    workspace = _scratch(problem.forward_workspace_bytes, out.device)
    if out_rest is None:
        problem.forward(to_core(out), to_core(lse), None, to_core(workspace))
    else:
        problem.keep(*map(to_core, (out, lse, None, out_rest, workspace)))
    return first_columns(out, columns), lse


def list_backward(
    pack: _core.Pack,
    threads: int,
    inputs: KeyListInputs,
    operands: tuple[Tensor | None, ...],
    wanted: tuple[str, ...],
) -> Gradients:
    """Compute `backward` for a call with key lists, whose kept data is out_rest."""
    return _differentiate(_list_problem, pack, threads, inputs, operands, wanted)


def copies_rows(
    pack: _core.Pack, threads: int, inputs: AttentionInputs, *, for_backward: bool
) -> bool:
    """Say whether query, key and value are copied first; see `_readable_problem`."""
    return _problem(pack, threads, inputs).needs_row_copies(for_backward)


def describe(
    pack: _core.Pack,
    threads: int,
    inputs: AttentionInputs,
    gradients: tuple[str, ...],
    keep: SelectionInputs | None,
) -> str:
    """Describe how a call is computed, as JSON, if gradients of these fields are wanted."""
    selection = None if keep is None else _selection(pack, threads, keep)
    return _problem(pack, threads, inputs).describe(gradients, selection)


def _selection(pack: _core.Pack, threads: int, inputs: SelectionInputs) -> _core.Selection:
    fields, stream = map(to_core, inputs), _stream(inputs.bias)
    return _core.Selection(pack, *fields, threads=threads, stream=stream)


def select(
    pack: _core.Pack, threads: int, results: tuple[Tensor, ...], inputs: SelectionInputs
) -> None:
    """Write start and end, or keep."""
    selection = _selection(pack, threads, inputs)
    workspace = _scratch(selection.workspace_bytes, inputs.bias.device)
    write = selection.keep if len(results) == 1 else selection.intervals
    write(*map(to_core, (*results, workspace)))


def forget(
    pack: _core.Pack,
    threads: int,
    results: tuple[Tensor, Tensor | None, Tensor | None],
    gates: tuple[Tensor, Tensor | None, Tensor | None],
    bounds: tuple[float, float],
) -> None:
    """Write the bias of forget gates, and start and end unless None; bounds: least, prune."""
    least, prune = bounds
    call, workspace = _forgetting(pack, threads, gates, least)
    bias, start, end = map(to_core, results)
    call.forget(bias, start, end, prune, to_core(workspace))


def forget_backward(
    pack: _core.Pack,
    threads: int,
    gradients: tuple[Tensor, Tensor],
    gates: tuple[Tensor, Tensor | None, Tensor | None],
    least: float,
) -> None:
    """Write the gradient of forget gates, the first of ``gradients``, from that of the bias."""
    call, workspace = _forgetting(pack, threads, gates, least)
    dgates, dbias = map(to_core, gradients)
    call.forget_backward(dbias, dgates, to_core(workspace))


def _forgetting(
    pack: _core.Pack,
    threads: int,
    gates: tuple[Tensor, Tensor | None, Tensor | None],
    least: float,
) -> tuple[_core.Forgetting, Tensor | None]:
    """Return a call of the core and its workspace."""
    log_forget, padding, cu_seqlens = map(to_core, gates)
    stream = _stream(gates[0])
    call = _core.Forgetting(pack, log_forget, padding, cu_seqlens, least, threads, stream)
    return call, _scratch(call.workspace_bytes, gates[0].device)


def to_core(field: object) -> Any:
    """Return a field in the form that the core reads.

    On an older torch a tensor becomes a description of its memory, which does not keep it alive.
    All other fields stay as they are.
    """
    if CORE_READS_TENSORS or not isinstance(field, Tensor):
        return field
    return (
        field.data_ptr(),
        str(field.dtype).removeprefix("torch."),
        tuple(field.shape),
        field.stride(),
        _DLPACK_DEVICES[field.device.type],
        field.device.index or 0,
    )


def _problem(pack: _core.Pack, threads: int, inputs: AttentionInputs) -> _core.Problem:
    fields = map(to_core, inputs)
    return _core.Problem(pack, *fields, threads=threads, stream=_stream(inputs.query))


def _list_problem(pack: _core.Pack, threads: int, inputs: KeyListInputs) -> _core.Problem:
    problem = _problem(pack, threads, inputs.without_lists())
    problem.list_keys(to_core(inputs.indices), to_core(inputs.index_bias))
    return problem


def _readable_problem(
    make: Callable[..., _core.Problem],
    pack: _core.Pack,
    threads: int,
    inputs: _Inputs,
    *,
    for_backward: bool,
) -> tuple[_core.Problem, _Inputs]:
    """Return the problem of a call, and the call with rows that the kernels of a pass can read.

    Args:
        make: makes the problem of the next three arguments.
        pack, threads, inputs: of the call.
        for_backward: whether the kernels of the backward pass read the rows, too.
    """
    problem = make(pack, threads, inputs)
    if not problem.needs_row_copies(for_backward):
        return problem, inputs
    query, key, value = (_with_readable_rows(pack, tensor) for tensor in inputs[:3])
    inputs = inputs._replace(query=query, key=key, value=value)
    return make(pack, threads, inputs), inputs


def _with_readable_rows(pack: _core.Pack, tensor: Tensor) -> Tensor:
    """Return a tensor, or a copy whose rows kernels can read: padded with zeros if need be."""
    if pack.row_bytes == 1:
        return tensor
    elements = pack.row_bytes // tensor.element_size()
    if tensor.shape[-1] % elements:
        # pad keeps the order channels_last.
        return pad(tensor, (0, -tensor.shape[-1] % elements)).contiguous()
    if has_readable_rows(tensor, pack.row_bytes):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _differentiate(
    make: Callable[..., _core.Problem],
    pack: _core.Pack,
    threads: int,
    inputs: _Inputs,
    operands: tuple[Tensor | None, ...],
    wanted: tuple[str, ...],
    plan: Tensor | None = None,
) -> Gradients:
    """Return the wanted gradients; see `backward` and `_readable_problem`."""
    call = inputs
    dout, dlse, out, lse, kept = operands
    assert dout is not None
    assert out is not None
    if tuple(dout.shape) == tuple(out.shape) == tuple(out_shape(inputs)):
        problem, inputs = _readable_problem(make, pack, threads, inputs, for_backward=True)
        dout, out = (_with_readable_rows(pack, tensor) for tensor in (dout, out))
    else:
        problem = make(pack, threads, inputs)  # which refuses one of them
    gradients: Gradients = {}
    for name in wanted:
        like: Tensor = getattr(inputs, name)
        gradients[name] = torch.empty_like(like, memory_format=torch.contiguous_format)
    workspace = _scratch(problem.backward_workspace_bytes, inputs.query.device)
    written_fields = {name: to_core(gradient) for name, gradient in gradients.items()}
    problem.backward(
        to_core(dout),
        to_core(dlse),
        to_core(out),
        to_core(lse),
        written_fields,
        to_core(plan),
        to_core(workspace),
        to_core(kept),
    )
    for name in {"query", "key", "value"} & gradients.keys():
        gradients[name] = first_columns(gradients[name], getattr(call, name).shape[-1])
    return gradients


def _out(inputs: AttentionInputs) -> Tensor:
    query = inputs.query
    return torch.empty(out_shape(inputs), dtype=query.dtype, device=query.device)


def _lse(inputs: AttentionInputs) -> Tensor:
    query = inputs.query
    return torch.empty(lse_shape(query), dtype=lse_dtype(inputs), device=query.device)


def _public_raw_stream(device_index: int) -> int:
    return int(torch.cuda.current_stream(device_index).cuda_stream)


# Avoids a Stream object, the most expensive torch query in a call. The torch function is private.
raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", _public_raw_stream
)


def _stream(tensor: Tensor) -> int:
    return raw_stream(tensor.device.index) if tensor.is_cuda else 0


def _zeros(size: int, device: torch.device) -> Tensor:
    """Return zeroed bytes, for plans that an operator returns: equal calls give equal bytes.

    Often only a small part of a plan's upper bound is written. So on a CPU large plans are mapped
    pages of zeros, which cost nothing until they are written; torch.zeros would write all of them.
    """
    if device.type != "cpu" or size < _PAGED_BYTES:
        return torch.zeros(size, dtype=torch.uint8, device=device)
    # MAP_PRIVATE, because a forked child must not see this process's writes.
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _bytes(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def _scratch(size: int, device: torch.device) -> Tensor | None:
    return _bytes(size, device) if size else None
