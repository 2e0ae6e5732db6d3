# SPDX-License-Identifier: BSD-3-Clause
"""Attention by a kernel pack, through the core."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from flash_dmattn import _core
from flash_dmattn.record import ATTENTION

from .base import (
    AttentionInputs,
    Backend,
    Gradients,
    SelectionInputs,
    interval_shape,
    keep_shape,
    lse_dtype,
    lse_shape,
    lse_within,
)

# torch >= 2.10: the core reads the tensor itself, in a fraction of the time.
_CORE_READS_TENSORS = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
# From here on mapping pages costs less than writing zeros.
_PAGED_BYTES = 1 << 17
_DLPACK_DEVICES = {"cpu": 1, "cuda": 2}
# What the core makes results with, since each crossing between it and Python costs a small call.
_ALLOCATOR = _core.Allocator(
    torch.empty_like, torch.contiguous_format, torch.float32, torch.float64, torch.uint8
)


class PackBackend(Backend):
    """Runs calls on the device that a kernel pack was loaded for."""

    def __init__(self, pack: _core.Pack) -> None:
        """Keep the pack, which outlives every call."""
        self.pack = pack
        self.name = "cpu" if pack.device_type == _DLPACK_DEVICES["cpu"] else "cuda"
        self._layouts = pack.plan_layouts
        self._threads = torch.get_num_threads if self.name == "cpu" else _one_thread

    def selects(self, inputs: AttentionInputs) -> bool:
        """Say whether it takes a call that selects by itself."""
        return True

    def plan_bytes(self, inputs: AttentionInputs) -> int:
        """Evaluate the formula of pack.h's fdm_plan_layout, which holds for symbolic sizes too."""
        mask = inputs.mask if inputs.start is None else inputs.start
        if mask is None:
            kind, lists = "none", 0
        elif inputs.start is not None:
            kind, lists = "intervals", _product(mask.shape[:-1])
        else:
            kind = "rows" if mask.shape[-2] > 1 else "keys"
            lists = _product(mask.shape[:-2])
        *sizes, tile_rows, tile_keys = self._layouts[kind]
        fixed, per_list, per_key, per_tile, per_tile_key = sizes
        if not inputs.packed:
            sequences, rows = 1, inputs.query.shape[1]
            keys = row_keys = inputs.key.shape[1]
        else:
            sequences, rows = inputs.sequences, inputs.query.shape[0]
            # Of a paged cache only tensors per key tell the number of keys; a mask with rows is
            # sized by row_keys.
            keys = inputs.key.shape[0] if mask is None or kind == "rows" else mask.shape[-1]
            row_keys = inputs.max_seqlen_k
        tiles = rows // tile_rows + sequences
        if kind == "intervals" and inputs.max_kept:
            tile_keys = inputs.max_kept + tile_rows - 1
        row_keys = torch.sym_min(row_keys, tile_keys)  # type: ignore[no-untyped-call]
        size: int = fixed + lists * (
            per_list + keys * per_key + tiles * (per_tile + row_keys * per_tile_key)
        )
        return size

    def make_plan(self, inputs: AttentionInputs, *, zeroed: bool) -> Tensor:
        """Turn the mask into columns."""
        problem, device = self._problem(inputs), inputs.query.device
        size = problem.plan_bytes
        plan = (_zeros if zeroed else _bytes)(size, device)
        if size:
            workspace = _scratch(problem.plan_workspace_bytes, device)
            problem.plan(exchanged(plan), exchanged(workspace))
        return plan

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run the forward pass, and plan it first if no plan is given."""
        out, lse, plan = self.keep(inputs, need_lse=True)
        assert lse is not None
        return out, lse, plan

    def keep(
        self, inputs: AttentionInputs, *, need_lse: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """As forward, in one call of the core, and with an allocation less if lse is not needed."""
        if _CORE_READS_TENSORS:
            made: tuple[Tensor, Tensor | None, Tensor | None] | None = _core.attend_and_keep(
                self.pack, self._threads(), _ALLOCATOR, need_lse, inputs
            )
            if made is not None:
                return made
        # An older torch; or one whose allocator has refused, which it now tells in its own words.
        query, plan = inputs.query, inputs.given_plan
        device = query.device
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        lse = torch.empty(lse_shape(query), dtype=lse_dtype(inputs), device=device)
        problem = self._problem(inputs)
        workspace_bytes = problem.forward_workspace_bytes
        if plan is None and (plan_bytes := problem.plan_bytes):
            plan = _bytes(plan_bytes, device)
            workspace_bytes = max(workspace_bytes, problem.plan_workspace_bytes)
            workspace = _scratch(workspace_bytes, device)
            problem.plan(exchanged(plan), exchanged(workspace))
        else:
            workspace = _scratch(workspace_bytes, device)
        problem.forward(exchanged(out), exchanged(lse), exchanged(plan), exchanged(workspace))
        return out, lse, plan

    def attend(self, inputs: AttentionInputs, *, need_lse: bool) -> tuple[Tensor, Tensor | None]:
        """As keep, with one allocation for all that is not kept."""
        if _CORE_READS_TENSORS:
            made: tuple[Tensor, Tensor | None] | None = _core.attend(
                self.pack, self._threads(), _ALLOCATOR, need_lse, inputs
            )
            if made is not None:
                return made
        query, plan = inputs.query, inputs.given_plan
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        lse = None
        if need_lse:
            lse = torch.empty(lse_shape(query), dtype=lse_dtype(inputs), device=query.device)
        problem, device = self._problem(inputs), query.device
        scratch = _scratch(problem.attend_bytes(need_lse, plan is not None), device)
        problem.attend(exchanged(out), exchanged(lse), exchanged(plan), exchanged(scratch))
        return out, lse

    def backward(
        self,
        inputs: AttentionInputs,
        dout: Tensor,
        dlse: Tensor | None,
        out: Tensor,
        lse: Tensor | None,
        wanted: tuple[str, ...],
    ) -> Gradients:
        """Run the backward pass on the plan of forward."""
        if lse is None:
            lse = lse_within(inputs.given_plan, inputs)
        gradients: Gradients = {}
        for name in wanted:
            like: Tensor = getattr(inputs, name)
            gradients[name] = torch.empty_like(like, memory_format=torch.contiguous_format)
        problem = self._problem(inputs)
        workspace = _scratch(problem.backward_workspace_bytes, out.device)
        problem.backward(
            exchanged(dout),
            exchanged(dlse),
            exchanged(out),
            exchanged(lse),
            {name: exchanged(gradient) for name, gradient in gradients.items()},
            exchanged(inputs.given_plan),
            exchanged(workspace),
        )
        return gradients

    def differentiate(
        self,
        tensors: tuple[Any, ...],
        settings: tuple[Any, ...],
        flags: tuple[bool, ...],
        dout: Tensor,
        dlse: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Run the backward pass in one call of the core."""
        if _CORE_READS_TENSORS:
            made: tuple[Tensor | None, ...] | None = _core.differentiate(
                self.pack,
                self._threads(),
                _ALLOCATOR,
                tensors,
                settings,
                dout,
                dlse,
                ATTENTION.differentiable,
                flags,
            )
            if made is not None:
                return made
        return super().differentiate(tensors, settings, flags, dout, dlse)

    def select_intervals(self, inputs: SelectionInputs) -> tuple[Tensor, Tensor]:
        """Select for a bias that is the same for every query."""
        shape, device = interval_shape(inputs), inputs.bias.device
        start = torch.empty(shape, dtype=torch.int32, device=device)
        end = torch.empty_like(start)  # without the sizes, which take torch longer to read
        if not self._has_selected(inputs, start, end):
            selection, workspace = self._selection(inputs)
            selection.intervals(exchanged(start), exchanged(end), exchanged(workspace))
        return start, end

    def select_keep(self, inputs: SelectionInputs) -> Tensor:
        """Select for each row of bias."""
        keep = torch.empty(keep_shape(inputs), dtype=torch.bool, device=inputs.bias.device)
        if not self._has_selected(inputs, keep, None):
            selection, workspace = self._selection(inputs)
            selection.keep(exchanged(keep), exchanged(workspace))
        return keep

    def _has_selected(
        self, inputs: SelectionInputs, start_or_keep: Tensor, end: Tensor | None
    ) -> bool:
        return _CORE_READS_TENSORS and _core.select(
            self.pack, self._threads(), start_or_keep, end, inputs
        )

    def describe(self, inputs: AttentionInputs, gradients: tuple[str, ...]) -> str:
        """Tell how a call is computed, as JSON; gradients of these fields are wanted."""
        return self._problem(inputs).describe(gradients)

    def _problem(self, inputs: AttentionInputs) -> _core.Problem:
        return _core.Problem(
            self.pack,
            *_exchanged_fields(inputs),
            threads=self._threads(),
            stream=self._stream(inputs.query),
        )

    def _selection(self, inputs: SelectionInputs) -> tuple[_core.Selection, Tensor | None]:
        selection = _core.Selection(
            self.pack,
            *_exchanged_fields(inputs),
            threads=self._threads(),
            stream=self._stream(inputs.bias),
        )
        # The tensor itself: what an older torch's is exchanged for does not keep it alive.
        return selection, _scratch(selection.workspace_bytes, inputs.bias.device)

    def _stream(self, tensor: Tensor) -> int:
        if self.name == "cpu":
            return 0
        return raw_stream(tensor.device.index)


def _one_thread() -> int:
    return 1


def _public_raw_stream(device_index: int) -> int:
    return int(torch.cuda.current_stream(device_index).cuda_stream)


# Without a Stream object, the costliest of what is asked of torch in a call. Not public.
raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", _public_raw_stream
)


def exchanged(field: object) -> Any:
    """Return what the core reads of a field: for a tensor, on an older torch what describes its
    memory; else the field itself.
    """
    if _CORE_READS_TENSORS or not isinstance(field, Tensor):
        return field
    return (
        field.data_ptr(),
        str(field.dtype).removeprefix("torch."),
        tuple(field.shape),
        field.stride(),
        _DLPACK_DEVICES[field.device.type],
        field.device.index or 0,
    )


def _exchanged_fields(inputs: AttentionInputs | SelectionInputs) -> Iterable[Any]:
    return inputs if _CORE_READS_TENSORS else map(exchanged, inputs)


def _zeros(size: int, device: torch.device) -> Tensor:
    """Return zeroed bytes, for plans that an operator returns: of equal calls they are equal.

    Of a plan's upper bound often little is written. So on a CPU large ones are pages of the system,
    which are zero, and cost nothing until they are written; torch.zeros would write all of them.
    """
    if device.type != "cpu" or size < _PAGED_BYTES:
        return torch.zeros(size, dtype=torch.uint8, device=device)
    # Private, since a child that is forked must not see what this process writes.
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _bytes(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def _scratch(size: int, device: torch.device) -> Tensor | None:
    return _bytes(size, device) if size else None


def _product(sizes: torch.Size) -> int:
    product = 1
    for size in sizes:
        product = product * size
    return product
