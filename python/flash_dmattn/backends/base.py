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
    "AttentionInputs",
    "Backend",
    "Gradients",
    "SelectionInputs",
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
        """Say whether it takes calls that select by themselves (`AttentionInputs.window`)."""
        return False

    def narrow_widths(self) -> tuple[int, int]:
        """Return the largest head dimension beside which values may be narrower, and their most
        columns; 0 where they may not.
        """
        return 0, 0

    def serves_lists(self, inputs: KeyListInputs) -> bool:
        """Say whether it has kernels for a call whose queries list their keys."""
        return False

    def forgets(self) -> bool:
        """Say whether it has kernels for forget gates."""
        return False

    def plan_bytes(self, inputs: AttentionInputs) -> int:
        """Return the length of a plan; sizes may be symbolic."""

    def make_plan(self, inputs: AttentionInputs, *, zeroed: bool) -> Tensor:
        """Return a plan (uint8, 1-D), which no values but the mask's and the cu_seqlens' determine.

        Kernels write what they read. With ``zeroed`` equal inputs also give equal bytes elsewhere.
        """

    def kept_bytes(self, inputs: AttentionInputs) -> int:
        """Return the length of what `forward` keeps; sizes may be symbolic."""
        return self.plan_bytes(inputs) if inputs.given_plan is None else 0

    def forward(
        self, inputs: AttentionInputs, *, zeroed: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return out (`out_shape`, query's dtype, contiguous), lse, and what else `backward` needs.

        That is uint8, 1-D, and None stands for no bytes. It begins with the plan if none is given.
        With ``zeroed`` it has `kept_bytes`, and of equal inputs it is equal.
        """

    def call(self, inputs: AttentionInputs) -> Any:
        """Return a call in the form that `attend` and `keep` take."""
        return inputs

    def describe(
        self, inputs: AttentionInputs, gradients: tuple[str, ...], keep: SelectionInputs | None
    ) -> str:
        """Tell how a call is computed, as JSON; gradients of these fields are wanted.

        ``keep`` is what `select_keep` got to make the mask of the call.

        What the backend tells nothing of is left out.

        Raises:
            TypeError, ValueError, NotImplementedError: what `forward` would raise.
        """

    def attend(self, call: Any, *, need_lse: bool) -> tuple[Tensor, Tensor | None]:
        """Return out, and lse if it is needed, of a call that keeps nothing for backward."""
        out, lse, _ = self.forward(call)
        return out, lse if need_lse else None

    def keep(self, call: Any, *, need_lse: bool) -> tuple[tuple[Tensor | None, ...], Any]:
        """Compute a call whose results autograd keeps.

        Returns:
            The tensors to save: of the record, and those of `forward`; and what else the backward
            pass needs, without references to tensors. An lse that is not needed may be None.
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
        """Do what `differentiate` does for what `keep` has returned, and unpacked tensors of it.

        None where that needs a closer look, with nothing done.
        """
        return None

    def settings(self, kept: Any) -> tuple[Any, ...]:
        """Return the settings of the call whose `keep` has returned this."""
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
        """Return the gradients of the fields that are wanted, of what `forward` has returned."""

    def differentiate(
        self,
        inputs: AttentionInputs,
        results: tuple[Tensor | None, ...],
        flags: tuple[bool, ...],
        dout: Tensor,
        dlse: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the differentiable fields of a call, in their order, where a flag
        wants them, else None. More flags than there are such fields give as many more of these.

        Args:
            inputs: of the call.
            results: those of `forward`.
            flags, dout, dlse: which gradients are wanted, and those of out and lse.
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
            inputs: of the call, without pages and without a window; tensors require no gradients.
            lse: what forward has returned.
        """
        return key_mass(inputs)

    def key_mass_reads_plan(self, inputs: AttentionInputs) -> bool:
        """Say whether `key_mass` reads the plan of a call that has one."""
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


def out_rest_bytes(inputs: AttentionInputs) -> int:
    """Return the bytes of what rounding leaves of out, one an element; 0 if no gradient needs it.

    The gradients of a row's scores sum to 0 only as exactly as out is known, and the gradient of a
    sink, and sums of that of a bias per key, collect what is missing of all rows.
    """
    query, bias = inputs.query, inputs.bias
    sums_rows = inputs.sink is not None if bias is None else bias.shape[-2] == 1
    if query.element_size() > 2 or not sums_rows:
        return 0
    return math.prod(out_shape(inputs))


def keep_shape(inputs: SelectionInputs) -> tuple[int, ...]:
    """Return the broadcast shape of bias and mask, by the head rule: of Hk and H comes H."""
    bias, mask = inputs.bias.shape, None if inputs.mask is None else inputs.mask.shape
    if mask is None:
        return tuple(bias)
    sizes = [b if m == 1 else m if b == 1 else max(b, m) for b, m in zip(bias, mask, strict=True)]
    if inputs.packed and bias[-2] != mask[-2]:
        # Rows run along the longest sequence, tensors per key along all of them.
        sizes[-1] = bias[-1] if mask[-2] == 1 else mask[-1]
    return tuple(sizes)


def interval_shape(inputs: SelectionInputs) -> tuple[int, ...]:
    """Return the shape of start and end: `keep_shape` without the query dimension."""
    *front, _, keys = keep_shape(inputs)
    return (*front, keys)
