# SPDX-License-Identifier: BSD-3-Clause
"""The reference as a backend: any device, float64 too, O(Q x K) memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_dmattn.masks import IntervalMask
from flash_dmattn.reference import (
    Sequence,
    attend,
    computing_dtype,
    computing_inputs,
    formula,
    packed_part,
    per_query_head,
    recorded_gradients,
    sequences,
    without_autocast,
)

from .base import (
    AttentionInputs,
    Backend,
    Gradients,
    SelectionInputs,
    interval_shape,
    keep_shape,
    lse_shape,
)
from .shapes import check_attention, check_selection

# Rows that are sorted at once: bounds the memory of selection, where a sort needs 9 bytes for each
# key of each row.
_ROWS_AT_ONCE = 256


class ReferenceBackend(Backend):
    """Runs calls in plain PyTorch operations."""

    name = "reference"

    def plan_bytes(self, inputs: AttentionInputs) -> int:
        """Return 0: the reference has no plan."""
        return 0

    def make_plan(self, inputs: AttentionInputs, *, zeroed: bool) -> Tensor:
        """Check the inputs, and return no bytes."""
        check_attention(inputs)
        return inputs.query.new_empty(0, dtype=torch.uint8)

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor, None]:
        """Compute by the formula."""
        check_attention(inputs)
        out, lse = formula(
            inputs.query,
            inputs.key,
            inputs.value,
            _mask(inputs),
            inputs.bias,
            inputs.cu_seqlens_q,
            inputs.cu_seqlens_k,
            inputs.block_table,
            inputs.scale,
            inputs.causal,
            inputs.softcap,
        )
        return out, lse, None

    def recorded_backward(
        self,
        inputs: AttentionInputs,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: tuple[bool, ...],
    ) -> tuple[Tensor, ...]:
        """Compute gradients that are differentiable themselves, which those of `backward` are not.

        They are recorded by autograd, with all intermediate results of the formula.
        """

        def compute(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Any:
            own = inputs._replace(query=query, key=key, value=value, bias=bias)
            return self.forward(own)[:2]

        tensors = (inputs.query, inputs.key, inputs.value, inputs.bias)
        return recorded_gradients(tensors, compute, (dout, dlse), wanted)

    def backward(
        self,
        inputs: AttentionInputs,
        dout: Tensor,
        dlse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        wanted: tuple[bool, bool, bool, bool],
    ) -> Gradients:
        """Compute by the formula's derivative: an operator's implementation runs below autograd."""
        dtype = computing_dtype(inputs.query.dtype)
        shaped_like = (inputs.query, inputs.key, inputs.value, inputs.bias)
        totals = [
            inputs.query.new_zeros(like.shape if want and like is not None else 0, dtype=dtype)
            for like, want in zip(shaped_like, wanted, strict=True)
        ]
        if dlse is None:
            dlse = torch.zeros((), dtype=dtype, device=out.device).expand(lse_shape(inputs.query))
        varlen = inputs.cu_seqlens_q is not None
        parts = sequences(
            *inputs[:3],
            _mask(inputs),
            inputs.bias,
            inputs.cu_seqlens_q,
            inputs.cu_seqlens_k,
            inputs.block_table,
        )
        for part in parts:
            part_dout = dout[part.rows].unsqueeze(0) if varlen else dout
            part_dlse = dlse[:, part.rows].unsqueeze(0) if varlen else dlse
            with without_autocast(out.device.type):
                gradients = _dense_gradients(inputs, part, part_dout.to(dtype), part_dlse.to(dtype))
            for total, gradient, place in zip(
                totals, gradients, _places(inputs, part), strict=True
            ):
                if total.numel() and gradient is not None:
                    total[place] = gradient[0] if varlen else gradient
        return Gradients(
            *(
                total.to(inputs.query.dtype if like is None else like.dtype)
                for total, like in zip(totals, shaped_like, strict=True)
            )
        )

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
            # argmax of booleans is the first True, and 0 if there is none.
            any_kept, first = kept.any(-2), kept.byte().argmax(-2)
            past = count - kept.flip(-2).byte().argmax(-2)
            start[..., keys] = (first * any_kept).to(torch.int32).reshape(start[..., keys].shape)
            end[..., keys] = (past * any_kept).to(torch.int32).reshape(end[..., keys].shape)
        return start, end

    def select_keep(self, inputs: SelectionInputs) -> Tensor:
        """Select for each row of the broadcast of bias and mask."""
        check_selection(inputs)
        keep = torch.zeros(keep_shape(inputs), dtype=torch.bool, device=inputs.bias.device)
        varlen = inputs.cu_seqlens_q is not None
        per_query = keep.shape[-2] != 1
        for rows, keys, bias, mask in _selection_sequences(inputs):
            count = rows.stop - rows.start
            kept = _select_rows(bias, mask, inputs, count, row_count=count if per_query else 1)
            if not varlen:
                keep[:] = kept
            elif per_query:
                keep[:, rows, : kept.shape[-1]] = kept[0]
            else:
                keep[:, :, keys] = kept[0]
        return keep


def _mask(inputs: AttentionInputs) -> Tensor | IntervalMask | None:
    if inputs.start is None or inputs.end is None:
        return inputs.mask
    return IntervalMask(inputs.start, inputs.end)


def _dense_gradients(
    inputs: AttentionInputs, part: Sequence, dout: Tensor, dlse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of one dense problem, laid out as query, key, value and bias."""
    query, key, value, kept, bias = computing_inputs(part, inputs.causal)
    attended = attend(part, inputs.scale, inputs.causal, inputs.softcap)
    probabilities = attended.probabilities
    dout = dout.transpose(1, 2).masked_fill(~kept.any(3).unsqueeze(-1), 0)
    dvalue = probabilities.transpose(-1, -2) @ dout
    dprobabilities = (dout @ value.transpose(-1, -2)).masked_fill(~kept, 0)
    # Not dout * out: of the same products as dscores, so that the rounding of these cancels.
    delta = (probabilities * dprobabilities).sum(-1) - dlse
    dscores = (probabilities * (dprobabilities - delta.unsqueeze(-1))).masked_fill(~kept, 0)
    dbias = None
    if bias is not None and part.bias is not None:
        by_kv_head = part.bias.shape[1] == part.key.shape[2]
        dbias = _group_sum(dscores, part) if by_kv_head else dscores
        dbias = dbias.sum_to_size(part.bias.shape)
    if inputs.softcap > 0:
        tanh = torch.tanh(inputs.scale * (query @ key.transpose(-1, -2)) / inputs.softcap)
        dscores = (dscores * (1 - tanh * tanh)).masked_fill(~kept, 0)
    dquery = inputs.scale * (dscores @ key)
    dkey = inputs.scale * (dscores.transpose(-1, -2) @ query)
    dkey, dvalue = _group_sum(dkey, part), _group_sum(dvalue, part)
    return dquery.transpose(1, 2), dkey.transpose(1, 2), dvalue.transpose(1, 2), dbias


def _group_sum(gradient: Tensor, part: Sequence) -> Tensor:
    """Sum (B, H, ...) over the query heads of each key/value head."""
    batch, heads, *rest = gradient.shape
    kv_heads = part.key.shape[2]
    return gradient.reshape(batch, kv_heads, heads // kv_heads, *rest).sum(2)


def _places(inputs: AttentionInputs, part: Sequence) -> tuple[tuple[slice, ...], ...]:
    """Return where the gradients of a sequence stand in those of the call."""
    everything = slice(None)
    if inputs.cu_seqlens_q is None:
        return ((everything,),) * 4
    if inputs.bias is not None and inputs.bias.shape[1] != 1:
        bias = (everything, part.rows, slice(0, part.key.shape[1]))
    else:
        bias = (everything, everything, part.keys)
    return (part.rows,), (part.keys,), (part.keys,), bias


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
    """Return bool (b, h, row_count, K): the keys with the largest bias, the lower index in ties."""
    keys = bias.shape[-1]
    heads = max(bias.shape[1], 1 if mask is None else mask.shape[1])
    bias = per_query_head(bias, heads, bias.shape[1])
    mask = None if mask is None else per_query_head(mask, heads, mask.shape[1])
    chunks = []
    for begin in range(0, row_count, _ROWS_AT_ONCE):
        rows = slice(begin, min(begin + _ROWS_AT_ONCE, row_count))
        scores = bias if bias.shape[2] == 1 else bias[:, :, rows]
        visible = ~torch.isnan(scores) & (scores != -torch.inf)
        if mask is not None:
            visible = visible & (mask if mask.shape[2] == 1 else mask[:, :, rows])
        if inputs.causal:
            row = torch.arange(rows.start, rows.stop, device=bias.device).unsqueeze(1)
            key = torch.arange(keys, device=bias.device)
            visible = visible & (key <= row + (keys - queries))
        scores = scores.masked_fill(~visible, -torch.inf)
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        best = order[..., : inputs.window]
        keep = torch.zeros_like(visible).scatter_(-1, best, True) & visible
        chunks.append(keep.expand(*keep.shape[:2], rows.stop - rows.start, keys))
    if not chunks:
        return bias.new_zeros((*bias.shape[:2], 0, keys), dtype=torch.bool)
    return torch.cat(chunks, dim=2)
