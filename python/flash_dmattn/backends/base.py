# SPDX-License-Identifier: BSD-3-Clause
"""The interface of a backend."""

from __future__ import annotations

import itertools
import math
from typing import Any, Protocol

import torch
from torch import Tensor

from flash_dmattn.record import (
    ATTENTION,
    AttentionInputs,
    Gradients,
    KeyListInputs,
    SelectionInputs,
)
from flash_dmattn.reference import computing_dtype, key_mass

__all__ = [
    "Backend",
    "first_columns",
    "has_readable_rows",
    "interval_shape",
    "keep_shape",
    "lse_dtype",
    "lse_shape",
    "mass_shape",
    "out_rest_bytes",
    "out_shape",
]

_TENSORS = ATTENTION.tensor_count


class Backend(Protocol):
    """One way to run attention on one device."""

    name: str

    def selects(self) -> bool:
        """Say whether it takes calls that select within the call (`AttentionInputs.window`)."""
        return False

    def narrow_widths(self) -> tuple[int, int]:
        """Return the largest head dimension of query and key for narrower values, and the largest
        head dimension of such values; (0, 0) if narrower values are not supported.
        """
        return 0, 0

    def copies_rows(self, inputs: AttentionInputs, *, for_backward: bool) -> bool:
        """Say whether it copies query, key and value first, without or with a backward pass."""
        return False

    def serves_lists(self, inputs: KeyListInputs) -> bool:
        """Say whether it has kernels for a call that lists the keys of each query."""
        return False

    def rest_bytes(self, inputs: AttentionInputs) -> int:
        """Return the bytes of out's rounding residual that its kernels keep for gradients."""
        return 0

    def forgets(self) -> bool:
        """Say whether it has kernels for forget gates."""
        return False

    def plan_bytes(self, inputs: AttentionInputs) -> int:
        """Return the size of a plan in bytes; sizes may be symbolic."""

    def make_plan(self, inputs: AttentionInputs, *, zeroed: bool) -> Tensor:
        """Return a plan (uint8, 1-D). It depends only on the values of the mask and the cu_seqlens.

        Kernels write all bytes that they read. With ``zeroed``, equal inputs give equal bytes
        everywhere.
        """

    def plans_blocks(self) -> bool:
        """Say whether it has plans of blocks."""
        return False

    def kept_bytes(self, inputs: AttentionInputs) -> int:
        """Return the size in bytes of what `forward` keeps; sizes may be symbolic."""
        return self.plan_bytes(inputs) if inputs.given_plan is None else 0

    def forward(
        self, inputs: AttentionInputs, *, zeroed: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return out (`out_shape`, query's dtype, contiguous), lse, and other data for `backward`.

        The data is uint8, 1-D; None stands for no bytes. It begins with the plan if none is given.
        With ``zeroed`` it has `kept_bytes` bytes, and equal inputs give equal bytes.
        """

    def call(self, inputs: AttentionInputs) -> Any:
        """Return a call in the form that `attend` and `keep` take."""
        return inputs

    def describe(
        self, inputs: AttentionInputs, gradients: tuple[str, ...], keep: SelectionInputs | None
    ) -> str:
        """Describe how a call is computed, as JSON, if gradients of these fields are wanted.

        ``keep`` is the input of the `select_keep` that made the call's mask. Steps that the backend
        has no information about are left out.

        Raises:
            TypeError, ValueError, NotImplementedError: what `forward` would raise.
        """

    def attend(self, call: Any, *, need_lse: bool) -> tuple[Tensor, Tensor | None]:
        """Return out, and lse if needed, of a call that keeps nothing for backward."""
        out, lse, _ = self.forward(call)
        return out, lse if need_lse else None

    def keep(self, call: Any, *, need_lse: bool) -> tuple[tuple[Tensor | None, ...], Any]:
        """Compute a call for autograd.

        Returns:
            The tensors to save: those of the record and those of `forward`. And other data for the
            backward pass, which holds no tensors. lse may be None if it is not needed.
        """
        return (*call[:_TENSORS], *self.forward(call)), call[_TENSORS:]

    def resume(
        self,
        kept: Any,
        saved: tuple[Tensor | None, ...],
        flags: tuple[bool, ...],
        dout: Tensor,
        dlse: Tensor | None,
    ) -> tuple[Tensor | None, ...] | None:
        """Do `differentiate` on the results of `keep`, with its saved tensors unpacked.

        Return None, without any computation, if the call needs the general path.
        """
        return None

    def settings(self, kept: Any) -> tuple[Any, ...]:
        """Return the settings of a call from the second result of its `keep`."""
        settings: tuple[Any, ...] = kept
        return settings

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
        """Return the gradients of the wanted fields, from the results of `forward`."""

    def differentiate(
        self,
        inputs: AttentionInputs,
        results: tuple[Tensor | None, ...],
        flags: tuple[bool, ...],
        dout: Tensor,
        dlse: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the call's differentiable fields in their order, None where a
        flag is False. Flags beyond these fields give None.

        Args:
            inputs: of the call.
            results: those of `forward`.
            flags, dout, dlse: the wanted gradients, and the gradients of out and lse.
        """
        out, lse, kept = results
        assert out is not None
        assert lse is not None
        wanted = tuple(itertools.compress(ATTENTION.differentiable, flags))
        gradients = self.backward(inputs, dout, dlse, out, lse, kept, wanted)
        more = len(flags) - len(ATTENTION.differentiable)
        return (*map(gradients.get, ATTENTION.differentiable), *(None,) * more)

    def key_mass(self, inputs: AttentionInputs, lse: Tensor) -> Tensor:
        """Return the sum of each key's probabilities, float32 of `mass_shape`.

        Args:
            inputs: of the call, without pages and without a window; no tensor requires a gradient.
            lse: of forward.
        """
        return key_mass(inputs)

    def key_mass_reads_plan(self, inputs: AttentionInputs) -> bool:
        """Say whether `key_mass` reads the plan of a call, if it has one."""
        return False

    def key_mass_kernel(self, inputs: AttentionInputs) -> str:
        """Return the name of the kernel of `key_mass`."""
        return "PyTorch operations"

    def select_intervals(self, inputs: SelectionInputs) -> tuple[Tensor, Tensor]:
        """Return start and end, int32 of `interval_shape`."""

    def select_keep(self, inputs: SelectionInputs) -> Tensor:
        """Return bool of `keep_shape`."""


def out_shape(inputs: AttentionInputs | KeyListInputs) -> tuple[int, ...]:
    """Return the shape of out: query's, with the head dimension of value."""
    return (*inputs.query.shape[:-1], inputs.value.shape[-1])


def lse_shape(query: Tensor) -> tuple[int, ...]:
    """Return the shape of lse: ``(B, H, Q)``, or ``(H, total_q)``."""
    if query.dim() == 4:
        batch, rows, heads, _ = query.shape
        return (batch, heads, rows)
    rows, heads, _ = query.shape
    return (heads, rows)


def mass_shape(inputs: AttentionInputs) -> tuple[int, ...]:
    """Return the shape of the key mass: ``(B, H, K)``, or ``(H, total_k)``."""
    heads = inputs.query.shape[-2]
    if inputs.packed:
        return (heads, inputs.key.shape[0])
    return (inputs.query.shape[0], heads, inputs.key.shape[1])


def lse_dtype(inputs: AttentionInputs) -> torch.dtype:
    """Return the dtype of lse."""
    return computing_dtype(inputs.query, inputs.bias)


def has_readable_rows(tensor: Tensor, row_bytes: int) -> bool:
    """Say whether rows can be copied ``row_bytes`` bytes at a time, whatever their length."""
    *strides, last = zip(tensor.shape, tensor.stride(), strict=True)
    elements = row_bytes // tensor.element_size()
    starts = all(size <= 1 or stride % elements == 0 for size, stride in strides)
    return last[1] == 1 and starts and tensor.data_ptr() % row_bytes == 0


def first_columns(tensor: Tensor, count: int) -> Tensor:
    """Return the first ``count`` columns of a tensor, contiguous."""
    return tensor if tensor.shape[-1] == count else tensor[..., :count].contiguous()


def out_rest_bytes(inputs: AttentionInputs, unit: int = 1) -> int:
    """Return the bytes of out's rounding residual, one per element; 0 if no gradient needs it.

    Rows count as padded to multiples of ``unit`` elements.

    The gradients of a row's scores sum to 0 only to the precision of out. The gradient of a sink,
    and row sums of a per-key bias's gradient, accumulate these errors over all rows.
    """
    query, bias = inputs.query, inputs.bias
    sums_rows = inputs.sink is not None if bias is None else bias.shape[-2] == 1
    if query.element_size() > 2 or not sums_rows:
        return 0
    *rows, columns = out_shape(inputs)
    return math.prod(rows) * (-(-columns // unit) * unit)


def keep_shape(inputs: SelectionInputs) -> tuple[int, ...]:
    """Return the broadcast shape of bias and mask; Hk and H broadcast to H."""
    bias, mask = inputs.bias.shape, None if inputs.mask is None else inputs.mask.shape
    if mask is None:
        return tuple(bias)
    sizes = [b if m == 1 else m if b == 1 else max(b, m) for b, m in zip(bias, mask, strict=True)]
    if inputs.packed and bias[-2] != mask[-2]:
        # Rows have max_seqlen_k columns; per-key tensors have total_k columns.
        sizes[-1] = bias[-1] if mask[-2] == 1 else mask[-1]
    return tuple(sizes)


def interval_shape(inputs: SelectionInputs) -> tuple[int, ...]:
    """Return the shape of start and end: `keep_shape` without the query dimension."""
    *front, _, keys = keep_shape(inputs)
    return (*front, keys)
