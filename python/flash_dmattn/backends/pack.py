# SPDX-License-Identifier: BSD-3-Clause
"""Attention by a kernel pack, through the core."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_dmattn import _core
from flash_dmattn.record import (
    ATTENTION,
    AttentionInputs,
    Gradients,
    KeyListInputs,
    MaskBlocks,
    SelectionInputs,
)

from . import portable, torch_memory
from .base import Backend, interval_shape, keep_shape, out_rest_bytes

# The core makes results with these, because each crossing into Python adds time to a small call.
_ALLOCATOR = _core.Allocator(
    torch.empty_like, torch.contiguous_format, torch.float32, torch.float64, torch.uint8
)
_TENSORS = ATTENTION.tensor_count
# Whether GPU packs also sum the key mass of calls without a mask. Triton is faster there.
KEY_MASS_WITHOUT_MASK = False
_MAX_KEY_ROWS = 2**31 - 1


class PackBackend(Backend):
    """Runs calls on the device that a kernel pack was loaded for.

    `torch_memory` handles calls that the core declines.
    """

    def __init__(self, pack: _core.Pack) -> None:
        """Store the pack, which outlives every call."""
        self.pack = pack
        self.name = {1: "cpu", 2: "cuda"}[pack.device_type]  # DLPack's types
        self._layouts = pack.plan_layouts
        self._threads = torch.get_num_threads if self.name == "cpu" else _one_thread

    def selects(self) -> bool:
        """Return True: packs select within the call."""
        return True

    def narrow_widths(self) -> tuple[int, int]:
        """Return the widths of the pack."""
        return self.pack.narrow_widths

    def copies_rows(self, inputs: AttentionInputs, *, for_backward: bool) -> bool:
        """Ask the core."""
        pack, threads = self.pack, self._threads()
        return torch_memory.copies_rows(pack, threads, inputs, for_backward=for_backward)

    def plan_bytes(self, inputs: AttentionInputs) -> int:
        """Evaluate the formula of pack.h's fdm_plan_layout; sizes may be symbolic."""
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
            # For a paged cache only per-key tensors have the number of keys. row_keys sizes a mask
            # with rows.
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

    def kept_bytes(self, inputs: AttentionInputs) -> int:
        """Return kept_bytes of the core's problem for a call with a separate lse."""
        size = super().kept_bytes(inputs)
        rest_bytes = self.rest_bytes(inputs)
        return _padded(size) + rest_bytes if rest_bytes else size

    def rest_bytes(self, inputs: AttentionInputs) -> int:
        """Return the padded size of out's residual; 0 if no gradient or no kernel needs it."""
        if not self.pack.wants_out_rest:
            return 0
        return _padded(out_rest_bytes(inputs, max(1, self.pack.row_bytes // 2)))

    def make_plan(self, inputs: AttentionInputs, *, zeroed: bool) -> Tensor:
        """Convert the mask to columns."""
        return torch_memory.make_plan(self.pack, self._threads(), inputs, zeroed=zeroed)

    def plans_blocks(self) -> bool:
        """Say whether the pack has plans of blocks."""
        return self.pack.plans_blocks

    def make_block_plan(self, inputs: AttentionInputs, blocks: MaskBlocks) -> Tensor:
        """Convert blocks to columns.

        Args:
            inputs: of a dense call with several queries, without a mask and a bias per query.
            blocks: its mask.
        """
        return torch_memory.make_block_plan(self.pack, self._threads(), inputs, blocks)

    def call(self, inputs: AttentionInputs) -> _core.Call:
        """Return the call. The core reads it when it is first computed."""
        return _core.Call(inputs)

    def forward(
        self, inputs: AttentionInputs, *, zeroed: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run the forward pass; make a plan first if none is given."""
        size = self.kept_bytes(inputs) if zeroed else None
        results = torch_memory.keep(self.pack, self._threads(), inputs, zeroed=size)
        out, lse, kept = results[_TENSORS:]
        assert out is not None
        assert lse is not None
        return out, lse, kept

    def attend(self, call: _core.Call, *, need_lse: bool) -> tuple[Tensor, Tensor | None]:
        """Run the forward pass, with one allocation for everything that is not returned."""
        pack, threads = self.pack, self._threads()
        results = call.attend(pack, threads, _ALLOCATOR, need_lse)
        if results is not None:
            return results
        return torch_memory.attend(pack, threads, AttentionInputs(*call.fields), need_lse=need_lse)

    def keep(self, call: _core.Call, *, need_lse: bool) -> tuple[tuple[Tensor | None, ...], Any]:
        """Run the forward pass, with one allocation less if lse is not needed."""
        pack, threads = self.pack, self._threads()
        results = call.keep(pack, threads, _ALLOCATOR, need_lse)
        if results is not None:
            return results, call
        inputs = AttentionInputs(*call.fields)
        return torch_memory.keep(pack, threads, inputs), inputs[_TENSORS:]

    def resume(
        self,
        kept: Any,
        saved: tuple[Tensor | None, ...],
        flags: tuple[bool, ...],
        dout: Tensor,
        dlse: Tensor | None,
    ) -> tuple[Tensor | None, ...] | None:
        """Run the backward pass without reading the record again."""
        if type(kept) is tuple:
            return None
        gradients: tuple[Tensor | None, ...] | None = kept.differentiate(
            self.pack, self._threads(), _ALLOCATOR, saved, dout, dlse, flags
        )
        return gradients

    def settings(self, kept: Any) -> tuple[Any, ...]:
        """Return the settings of the call's record."""
        settings: tuple[Any, ...] = kept if type(kept) is tuple else kept.fields[_TENSORS:]
        return settings

    def differentiate(
        self,
        inputs: AttentionInputs,
        results: tuple[Tensor | None, ...],
        flags: tuple[bool, ...],
        dout: Tensor,
        dlse: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Run the backward pass in one call of the core."""
        saved: tuple[Any, ...] = (*inputs[:_TENSORS], *results)
        gradients = self.resume(self.call(inputs), saved, flags, dout, dlse)
        if gradients is not None:
            return gradients
        return super().differentiate(inputs, results, flags, dout, dlse)

    def backward(
        self,
        inputs: AttentionInputs,
        dout: Tensor,
        dlse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        kept: Tensor | None,
        wanted: tuple[str, ...],
    ) -> Gradients:
        """Run the backward pass on the plan of forward."""
        operands = (dout, dlse, out, lse, kept)
        return torch_memory.backward(self.pack, self._threads(), inputs, operands, wanted)

    def key_mass(self, inputs: AttentionInputs, lse: Tensor) -> Tensor:
        """Run the pack's kernel, or Triton's if the pack has none for this call."""
        if self._pack_computes_mass(inputs):
            return torch_memory.key_mass(self.pack, self._threads(), inputs, lse)
        if self._triton_computes_mass(inputs):
            # Triton makes its own plan; its format differs from that of packs.
            triton = portable.load("triton", self.name, "backend=None")
            return triton.key_mass(inputs._replace(given_plan=None), lse)
        return super().key_mass(inputs, lse)

    def key_mass_reads_plan(self, inputs: AttentionInputs) -> bool:
        """Say whether `key_mass` reads the plan of a call, if it has one."""
        return self._pack_computes_mass(inputs)

    def key_mass_kernel(self, inputs: AttentionInputs) -> str:
        """Return the name of the kernel of `key_mass`."""
        if self._pack_computes_mass(inputs):
            return f"key_mass of {self.pack.name}"
        return (
            "key_mass_kernel of Triton"
            if self._triton_computes_mass(inputs)
            else "PyTorch operations"
        )

    def serves_lists(self, inputs: KeyListInputs) -> bool:
        """Say whether it has kernels for a call that lists the keys of each query."""
        query, key, bias = inputs.query, inputs.key, inputs.bias
        return (
            self.pack.lists_keys
            and str(query.dtype).removeprefix("torch.") in self.pack.dtypes
            and query.shape[-1] == inputs.value.shape[-1] <= self.pack.max_head_dim
            and (bias is None or bias.dtype != torch.float64 or "float32" in self.pack.dtypes)
            and min(query.numel(), key.numel(), inputs.indices.numel()) > 0
            and (inputs.block_table is None or key.shape[0] * key.shape[1] <= _MAX_KEY_ROWS)
        )

    def forgets(self) -> bool:
        """Say whether it has kernels for forget gates."""
        return self.pack.forgets

    def list_forward(self, inputs: KeyListInputs, out_rest: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return out and lse of a call that lists the keys of each query.

        Args:
            inputs: of the call.
            out_rest: written, unless it is None: out's rounding residual, of `rest_bytes`.
        """
        return torch_memory.list_forward(self.pack, self._threads(), inputs, out_rest)

    def list_backward(
        self,
        inputs: KeyListInputs,
        operands: tuple[Tensor | None, ...],
        wanted: tuple[str, ...],
    ) -> Gradients:
        """Return the gradients of the wanted fields, with row sums in any order.

        Args:
            inputs: of the call.
            operands: the gradients of out and lse, then out, lse and out_rest.
            wanted: names of fields.
        """
        return torch_memory.list_backward(self.pack, self._threads(), inputs, operands, wanted)

    def forget(
        self,
        results: tuple[Tensor, Tensor | None, Tensor | None],
        gates: tuple[Tensor, Tensor | None, Tensor | None],
        least: float,
        prune: float,
    ) -> None:
        """Write the bias of forget gates, and start and end unless they are None.

        Args:
            results: the output tensors.
            gates: the gates, their padding and the bounds of packed sequences.
            least: lower bound of a gate; smaller gates count as it.
            prune: the threshold below which keys are dropped; 0 without pruning.
        """
        pack, threads = self.pack, self._threads()
        if not _core.forget(pack, threads, results, gates, least, prune):
            torch_memory.forget(pack, threads, results, gates, (least, prune))

    def forget_backward(
        self,
        gradient: Tensor,
        dbias: Tensor,
        gates: tuple[Tensor, Tensor | None, Tensor | None],
        least: float,
    ) -> None:
        """Write the gradient of forget gates; ``gates`` is as in `forget`."""
        pack, threads = self.pack, self._threads()
        if not _core.forget_backward(pack, threads, dbias, gradient, gates, least):
            torch_memory.forget_backward(pack, threads, (gradient, dbias), gates, least)

    def _pack_computes_mass(self, inputs: AttentionInputs) -> bool:
        biases = self.pack.key_mass_biases
        serves_bias = biases == "all" or inputs.bias is None or inputs.bias.shape[-2] == 1
        if biases == "none" or not serves_bias:
            return False
        has_mask = inputs.mask is not None or inputs.start is not None
        if has_mask or self.name != "cuda" or KEY_MASS_WITHOUT_MASK:
            return True
        return not self._triton_computes_mass(inputs)

    def _triton_computes_mass(self, inputs: AttentionInputs) -> bool:
        is_float64 = inputs.bias is not None and inputs.bias.dtype == torch.float64
        return not is_float64 and portable.why_unavailable("triton", self.name) is None

    def select_intervals(self, inputs: SelectionInputs) -> tuple[Tensor, Tensor]:
        """Select for a bias that is the same for every query."""
        shape, device = interval_shape(inputs), inputs.bias.device
        start = torch.empty(shape, dtype=torch.int32, device=device)
        end = torch.empty_like(start)  # faster than torch.empty with sizes
        self._select((start, end), inputs)
        return start, end

    def select_keep(self, inputs: SelectionInputs) -> Tensor:
        """Select for each row of bias."""
        keep = torch.empty(keep_shape(inputs), dtype=torch.bool, device=inputs.bias.device)
        self._select((keep,), inputs)
        return keep

    def _select(self, results: tuple[Tensor, ...], inputs: SelectionInputs) -> None:
        pack, threads = self.pack, self._threads()
        if not _core.select(pack, threads, results, inputs):
            torch_memory.select(pack, threads, results, inputs)

    def describe(
        self, inputs: AttentionInputs, gradients: tuple[str, ...], keep: SelectionInputs | None
    ) -> str:
        """Describe how a call is computed, as JSON, if gradients of these fields are wanted."""
        if gradients:
            gradients = torch_memory.computed_gradients(inputs, gradients)
        return torch_memory.describe(self.pack, self._threads(), inputs, gradients, keep)


def _one_thread() -> int:
    return 1


def _padded(size: int) -> int:
    """Return the padded size of a part of the kept bytes."""
    return (size + 255) // 256 * 256


def _product(sizes: torch.Size) -> int:
    product = 1
    for size in sizes:
        product = product * size
    return product
