# SPDX-License-Identifier: BSD-3-Clause
"""The reference as a backend: any device, also float64, O(Q x K) memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_dmattn.record import (
    ATTENTION,
    AttentionInputs,
    Gradients,
    SelectionInputs,
    differentiable_tensors,
)
from flash_dmattn.reference import (
    Sequence,
    attend,
    computing_dtype,
    computing_inputs,
    formula,
    key_mass,
    packed_part,
    per_query_head,
    recorded_gradients,
    sequences,
    softmax_shares,
    without_autocast,
)

from .base import Backend, interval_shape, keep_shape, lse_shape
from .shapes import check_attention, check_selection

# Rows that are sorted at once. This bounds the memory of selection: a sort needs 9 bytes per key of
# each row.
_ROWS_AT_ONCE = 256


class ReferenceBackend(Backend):
    """Runs calls in plain PyTorch operations."""

    name = "reference"

    def plan_bytes(self, inputs: AttentionInputs) -> int:
        """Return 0: the reference has no plan."""
        return 0

    def make_plan(self, inputs: AttentionInputs, *, zeroed: bool) -> Tensor:
        """Check the inputs, and return an empty tensor."""
        check_attention(inputs, allows_other_value_dim=True)
        return inputs.query.new_empty(0, dtype=torch.uint8)

    def describe(self, inputs: AttentionInputs, *_: Any) -> str:
        """Check the inputs; the description is empty."""
        check_attention(inputs, allows_other_value_dim=True)
        return "{}"

    def forward(
        self, inputs: AttentionInputs, *, zeroed: bool = False
    ) -> tuple[Tensor, Tensor, None]:
        """Compute by the formula."""
        check_attention(inputs, allows_other_value_dim=True)
        return *formula(inputs), None

    def recorded_backward(
        self,
        inputs: AttentionInputs,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: tuple[str, ...],
    ) -> Gradients:
        """Compute gradients that are themselves differentiable, unlike those of `backward`.

        Autograd records them, with all intermediate results of the formula.
        """

        def compute(tensors: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
            call = inputs._replace(**tensors)  # type: ignore[arg-type]
            return self.forward(call)[:2]

        tensors = differentiable_tensors(inputs)
        return recorded_gradients(tensors, compute, (dout, dlse), wanted)

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
        """Compute the formula's derivative explicitly: an operator's kernel runs below autograd."""
        dtype = computing_dtype(inputs.query, inputs.bias)
        totals: Gradients = {}
        for name in wanted:
            totals[name] = inputs.query.new_zeros(getattr(inputs, name).shape, dtype=dtype)
        if dlse is None:
            dlse = torch.zeros((), dtype=dtype, device=out.device).expand(lse_shape(inputs.query))
        for part in sequences(inputs):
            part_dout = dout[part.rows].unsqueeze(0) if inputs.packed else dout
            part_dlse = dlse[:, part.rows].unsqueeze(0) if inputs.packed else dlse
            with without_autocast(out.device.type):
                gradients = _dense_gradients(inputs, part, part_dout.to(dtype), part_dlse.to(dtype))
            slices = _gradient_slices(inputs, part)
            for name, total in totals.items():
                gradient = gradients[name]
                if name == "sink":
                    total += gradient
                    continue
                total[slices[name]] = gradient[0] if inputs.packed else gradient
        return {name: total.to(getattr(inputs, name).dtype) for name, total in totals.items()}

    def key_mass(self, inputs: AttentionInputs, lse: Tensor) -> Tensor:
        """Sum by the formula, in row chunks."""
        check_attention(inputs, allows_other_value_dim=True)
        return key_mass(inputs)

    def select_intervals(self, inputs: SelectionInputs) -> tuple[Tensor, Tensor]:
        """Select row by row, and find the first and the last row of each key."""
        check_selection(inputs)
        shape = interval_shape(inputs)
        start, end = (
            torch.zeros(shape, dtype=torch.int32, device=inputs.bias.device) for _ in range(2)
        )
        for rows, keys, bias, mask in _selection_sequences(inputs):
            count = rows.stop - rows.start
            if count == 0:
                continue
            kept = _select_rows(bias, mask, inputs, count, row_count=count)
            # argmax of booleans is the first True, or 0 if there is none.
            any_kept, first = kept.any(-2), kept.byte().argmax(-2)
            past = count - kept.flip(-2).byte().argmax(-2)
            start[..., keys] = (first * any_kept).to(torch.int32).reshape(start[..., keys].shape)
            end[..., keys] = (past * any_kept).to(torch.int32).reshape(end[..., keys].shape)
        return start, end

    def select_keep(self, inputs: SelectionInputs) -> Tensor:
        """Select for each row of the broadcast of bias and mask."""
        check_selection(inputs)
        keep = torch.zeros(keep_shape(inputs), dtype=torch.bool, device=inputs.bias.device)
        per_query = keep.shape[-2] != 1
        for rows, keys, bias, mask in _selection_sequences(inputs):
            count = rows.stop - rows.start
            kept = _select_rows(bias, mask, inputs, count, row_count=count if per_query else 1)
            if not inputs.packed:
                keep[:] = kept
            elif per_query:
                keep[:, rows, : kept.shape[-1]] = kept[0]
            else:
                keep[:, :, keys] = kept[0]
        return keep


def _dense_gradients(
    inputs: AttentionInputs, part: Sequence, dout: Tensor, dlse: Tensor
) -> Gradients:
    """Return the gradients of one dense problem, in the layout of the call's tensors."""
    query, key, value, kept, bias = computing_inputs(part, inputs.causal)
    attended = attend(part, inputs)
    probabilities = attended.probabilities
    dout = dout.transpose(1, 2).masked_fill(~kept.any(3).unsqueeze(-1), 0)
    dvalue = probabilities.transpose(-1, -2) @ dout
    dprobabilities = (dout @ value.transpose(-1, -2)).masked_fill(~kept, 0)
    # Uses the products of dscores, so that rounding errors cancel. dout * out has other errors.
    delta = (probabilities * dprobabilities).sum(-1)
    dscores = probabilities * (dprobabilities - delta.unsqueeze(-1))
    gradients: Gradients = {}
    if inputs.sink is None:
        dscores = dscores + probabilities * dlse.unsqueeze(-1)
    else:
        _, sink_share = softmax_shares(inputs.sink, attended.lse)
        gradients["sink"] = -(sink_share * delta).masked_fill(~kept.any(3), 0).sum((0, 2))
        without_sink = attend(part, inputs._replace(sink=None)).probabilities
        dscores = dscores + without_sink * dlse.unsqueeze(-1)
    dscores = dscores.masked_fill(~kept, 0)
    if bias is not None and part.bias is not None:
        by_kv_head = part.bias.shape[1] == part.key.shape[2]
        dbias = _group_sum(dscores, part) if by_kv_head else dscores
        gradients["bias"] = dbias.sum_to_size(part.bias.shape)
    if inputs.softcap > 0:
        tanh = torch.tanh(inputs.scale * (query @ key.transpose(-1, -2)) / inputs.softcap)
        dscores = (dscores * (1 - tanh * tanh)).masked_fill(~kept, 0)
    dquery = inputs.scale * (dscores @ key)
    dkey = inputs.scale * (dscores.transpose(-1, -2) @ query)
    dkey, dvalue = _group_sum(dkey, part), _group_sum(dvalue, part)
    for name, gradient in (("query", dquery), ("key", dkey), ("value", dvalue)):
        gradients[name] = gradient.transpose(1, 2)
    return gradients


def _group_sum(gradient: Tensor, part: Sequence) -> Tensor:
    """Sum ``(B, H, ...)`` over the query heads of each KV head."""
    batch, heads, *rest = gradient.shape
    kv_heads = part.key.shape[2]
    return gradient.reshape(batch, kv_heads, heads // kv_heads, *rest).sum(2)


def _gradient_slices(inputs: AttentionInputs, part: Sequence) -> dict[str, tuple[slice, ...]]:
    """Return the indices of one sequence's gradients within those of the call."""
    everything = slice(None)
    if not inputs.packed:
        return dict.fromkeys(ATTENTION.differentiable, (everything,))
    if inputs.bias is not None and inputs.bias.shape[1] != 1:
        bias = (everything, part.rows, slice(0, part.key.shape[1]))
    else:
        bias = (everything, everything, part.keys)
    return {"query": (part.rows,), "key": (part.keys,), "value": (part.keys,), "bias": bias}


def _selection_sequences(
    inputs: SelectionInputs,
) -> list[tuple[slice, slice, Tensor, Tensor | None]]:
    """Return the rows, the keys, and the 4-D bias and mask of each sequence."""
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
        rows, keys = slice(0, inputs.queries), slice(0, inputs.keys)
        return [(rows, keys, inputs.bias, inputs.mask)]
    q_bounds, k_bounds = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
    parts = []
    for index in range(inputs.batch):
        rows = slice(q_bounds[index], q_bounds[index + 1])
        keys = slice(k_bounds[index], k_bounds[index + 1])
        bias = packed_part(inputs.bias, rows, keys)
        mask = None if inputs.mask is None else packed_part(inputs.mask, rows, keys)
        parts.append((rows, keys, bias, mask))
    return parts


def _select_rows(
    bias: Tensor, mask: Tensor | None, inputs: SelectionInputs, queries: int, row_count: int
) -> Tensor:
    """Return bool ``(b, h, row_count, K)``: the last and the first keys that each row sees, and of
    the others those with the largest bias; ties go to the lower index.
    """
    keys = bias.shape[-1]
    heads = max(bias.shape[1], 1 if mask is None else mask.shape[1])
    bias = per_query_head(bias, heads, bias.shape[1])
    mask = None if mask is None else per_query_head(mask, heads, mask.shape[1])
    chunks = []
    for begin in range(0, row_count, _ROWS_AT_ONCE):
        rows = slice(begin, min(begin + _ROWS_AT_ONCE, row_count))
        scores = bias if bias.shape[2] == 1 else bias[:, :, rows]
        visible = torch.ones_like(scores, dtype=torch.bool)
        if mask is not None:
            visible = visible & (mask if mask.shape[2] == 1 else mask[:, :, rows])
        if inputs.causal:
            row = torch.arange(rows.start, rows.stop, device=bias.device).unsqueeze(1)
            key = torch.arange(keys, device=bias.device)
            visible = visible & (key <= row + (keys - queries))
        number = visible.cumsum(-1)
        is_first_or_last = (number <= inputs.keep_first) | (
            number > number[..., -1:] - inputs.keep_last
        )
        visible = visible & ~torch.isnan(scores) & (scores != -torch.inf)
        ranked = visible & ~is_first_or_last
        scores = scores.masked_fill(~ranked, -torch.inf)
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        best = order[..., : inputs.window]
        keep = (torch.zeros_like(visible).scatter_(-1, best, True) & ranked) | (
            visible & is_first_or_last
        )
        chunks.append(keep.expand(*keep.shape[:2], rows.stop - rows.start, keys))
    if not chunks:
        return bias.new_zeros((*bias.shape[:2], 0, keys), dtype=torch.bool)
    return torch.cat(chunks, dim=2)
