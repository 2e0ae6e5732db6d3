# SPDX-License-Identifier: BSD-3-Clause
"""What a backend gets and does."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class AttentionInputs(NamedTuple):
    """One attention call, in the order of the operator's arguments.

    Dense: query ``(B, Q, H, D)``, key and value ``(B, K, Hk, D)``, mask and bias 4-D, start and end
    3-D.
    Varlen, when the cu_seqlens are there: query ``(total_q, H, D)``, key and value ``(total_k, Hk,
    D)`` or paged ``(pages, page, Hk, D)``, mask and bias 3-D, start and end 2-D.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    start: Tensor | None
    end: Tensor | None
    bias: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    block_table: Tensor | None
    plan: Tensor | None  # made by the backend for the same mask and sizes; None: forward makes one
    max_seqlen_q: int
    max_seqlen_k: int
    scale: float
    causal: bool
    softcap: float
    deterministic: bool


class SelectionInputs(NamedTuple):
    """One selection, in the order of the operator's arguments; bias and mask 4-D, varlen 3-D."""

    bias: Tensor
    mask: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    batch: int
    heads: int
    kv_heads: int
    queries: int  # varlen: of the longest sequence
    keys: int
    window: int
    causal: bool


class Gradients(NamedTuple):
    """Which gradients are wanted, or the gradients; unwanted ones are empty tensors."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor


class Backend(Protocol):
    """One way to run attention on one device."""

    name: str

    def plan_bytes(self, inputs: AttentionInputs) -> int:
        """Return the length of a plan; sizes may be symbolic."""

    def make_plan(self, inputs: AttentionInputs, *, zeroed: bool) -> Tensor:
        """Return a plan (uint8, 1-D), which no values but the mask's and the cu_seqlens' determine.

        Kernels write what they read. With ``zeroed`` equal inputs also give equal bytes elsewhere.
        """

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return out (query's shape and dtype, contiguous), lse, and the plan that was used.

        None stands for a plan of no bytes.
        """

    def attend(self, inputs: AttentionInputs, *, need_lse: bool) -> tuple[Tensor, Tensor | None]:
        """Return out, and lse if it is needed, of a call that keeps nothing for backward."""
        out, lse, _ = self.forward(inputs)
        return out, lse if need_lse else None

    def backward(
        self,
        inputs: AttentionInputs,
        dout: Tensor,
        dlse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        wanted: tuple[bool, bool, bool, bool],
    ) -> Gradients:
        """Return the wanted gradients of query, key, value and bias; inputs have forward's plan."""

    def select_intervals(self, inputs: SelectionInputs) -> tuple[Tensor, Tensor]:
        """Return start and end, int32 of `interval_shape`."""

    def select_keep(self, inputs: SelectionInputs) -> Tensor:
        """Return bool of `keep_shape`."""


def lse_shape(query: Tensor) -> tuple[int, ...]:
    """Return the shape of lse: ``(B, H, Q)``, or ``(H, total_q)``."""
    if query.dim() == 4:
        batch, rows, heads, _ = query.shape
        return (batch, heads, rows)
    rows, heads, _ = query.shape
    return (heads, rows)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of lse for query's dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def keep_shape(inputs: SelectionInputs) -> tuple[int, ...]:
    """Return the broadcast shape of bias and mask, by the head rule: of Hk and H comes H."""
    bias, mask = inputs.bias.shape, None if inputs.mask is None else inputs.mask.shape
    if mask is None:
        return tuple(bias)
    sizes = [b if m == 1 else m if b == 1 else max(b, m) for b, m in zip(bias, mask, strict=True)]
    if inputs.cu_seqlens_q is not None and bias[-2] != mask[-2]:
        # Rows run along the longest sequence, tensors per key along all of them.
        sizes[-1] = bias[-1] if mask[-2] == 1 else mask[-1]
    return tuple(sizes)


def interval_shape(inputs: SelectionInputs) -> tuple[int, ...]:
    """Return the shape of start and end: `keep_shape` without the query dimension."""
    *front, _, keys = keep_shape(inputs)
    return (*front, keys)
