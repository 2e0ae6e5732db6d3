# SPDX-License-Identifier: BSD-3-Clause
"""Attention over listed keys in plain PyTorch: any device and dtype, memory of the lists' size.

It processes row chunks and computes only the scores of the listed keys. 16-bit and float32 inputs
are computed in float32; a float64 query or bias is computed in float64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flash_dmattn.backends.base import lse_shape, mass_shape, out_shape
from flash_dmattn.record import Gradients, KeyListInputs
from flash_dmattn.reference import computing_dtype, softmax_shares, without_autocast

from .products import Gathered
from .visible_keys import VisibleKeys, bias_strides, by_head, key_rows, visible_keys

__all__ = ["backward", "forward", "key_mass"]

# Elements of the largest tensor of a chunk. On CPUs it fits the caches.
_GATHERED_ON_CPU = 2**19
_GATHERED_ELSEWHERE = 2**25


class _Call(NamedTuple):
    """A call, with its tensors by head and row."""

    inputs: KeyListInputs
    is_recorded: bool  # whether autograd differentiates the operations
    dtype: torch.dtype
    heads: int
    kv_heads: int
    rows: VisibleKeys
    query: Tensor  # (rows, H, D)
    out: Tensor  # (rows, H, Dv), uninitialized
    indices: Tensor  # (h, rows, k)
    index_bias: Tensor | None  # (h, rows, k)
    bias: Tensor | None  # flattened over keys and heads, then a 0 for "no key"
    key: Tensor  # (Hk * keys + 1, D): a table, see `products`
    value: Tensor  # (Hk * keys + 1, Dv): a table, too

    @property
    def is_readable(self) -> bool:
        """Whether values can be read: not on a GPU, which would synchronize, nor in torch.func."""
        return self.query.is_cpu and not self.is_recorded


class _Chunk(NamedTuple):
    """Some rows of a call. Dimension g has the query heads of each of the h lists."""

    query: Tensor  # (h, rows, g, D), times the scale; zeros for rows without keys
    empty: Tensor | None  # (h, rows, 1), True for rows without keys; None: there are none
    invalid: Tensor | None  # (h, rows, 1, k), True for entries that are no key; None: all are keys
    rows: VisibleKeys
    listed: Tensor  # (h, rows, k), 0 for entries out of range
    valid: Tensor  # (h, rows, k), True for entries that are keys
    keys: Gathered
    values: Gathered
    bias_indices: Tensor | None  # (h, rows, k), indices into `_Call.bias`
    slope: Tensor | None  # derivative of the softcap
    probabilities: Tensor  # (h, rows, g, k); they sum to 1, excluding the sink
    lse: Tensor  # (h, rows, g)


def forward(inputs: KeyListInputs, *, recorded: bool = False) -> tuple[Tensor, Tensor]:
    """Return out and lse; with ``recorded`` by operations that support torch's transforms."""
    with without_autocast(inputs.query.device.type):
        call = _call(inputs, recorded)
        out = call.out
        lse = call.query.new_empty((out.shape[0], call.heads), dtype=call.dtype)
        parts = [(out[:0], lse[:0])]
        for rows in _chunks(call):
            chunk = _chunk(call, rows)
            weights, chunk_lse = chunk.probabilities, chunk.lse
            if inputs.sink is not None:
                key_share, _ = _softmax_shares(inputs.sink, chunk_lse)
                weights = weights * key_share.unsqueeze(-1)
            chunk_out = chunk.values.sums(weights)
            if chunk.empty is not None:
                chunk_lse = chunk_lse.masked_fill(chunk.empty, -torch.inf)
            if recorded:
                parts.append((_by_row(chunk_out).to(out.dtype), _by_row(chunk_lse)))
            else:
                _by_list(out[rows], chunk_out.shape[0]).copy_(chunk_out)
                _by_list(lse[rows], chunk_out.shape[0]).copy_(chunk_lse)
        if recorded:
            out, lse = (torch.cat(results) for results in zip(*parts, strict=True))
        return out.reshape(out_shape(inputs)), _to_lse_layout(lse, inputs)


def backward(
    inputs: KeyListInputs, dout: Tensor, dlse: Tensor | None, wanted: tuple[str, ...]
) -> Gradients:
    """Return the gradients of the wanted fields."""
    with without_autocast(inputs.query.device.type):
        call = _call(inputs, is_recorded=False)
        dout = dout.reshape(call.out.shape)
        if dlse is not None:
            dlse = dlse.transpose(-1, -2).reshape(call.query.shape[:2])
        totals: Gradients = {}
        for name in wanted:
            like: Tensor = getattr(inputs if name == "sink" else call, name)
            # A row's own gradients are overwritten. The others are accumulated.
            make = torch.empty if name in ("query", "index_bias") else torch.zeros
            totals[name] = make(like.shape, dtype=call.dtype, device=like.device)
        for rows in _chunks(call):
            _add_gradients(call, rows, dout, dlse, totals)
        return {name: _to_input_layout(inputs, name, total) for name, total in totals.items()}


def key_mass(inputs: KeyListInputs, *, recorded: bool = False) -> Tensor:
    """Return the sum of each key's probabilities; ``recorded`` as in `forward`."""
    shape = mass_shape(inputs.without_lists())
    with without_autocast(inputs.query.device.type):
        call = _call(inputs, recorded)
        total = torch.zeros(math.prod(shape) + 1, dtype=call.dtype, device=call.query.device)
        laid_out = inputs._replace(bias=total[:-1].view(*shape[:-1], 1, shape[-1]))
        for rows in _chunks(call):
            chunk = _chunk(call, rows)
            weights = chunk.probabilities
            if inputs.sink is not None:
                key_share, _ = _softmax_shares(inputs.sink, chunk.lse)
                weights = weights * key_share.unsqueeze(-1)
            visible = VisibleKeys(*(t.long() for t in chunk.rows))
            indices = _bias_indices(laid_out, visible, chunk.listed.long(), chunk.valid).reshape(-1)
            parts = _of_heads(weights, call.heads).reshape(-1)
            if recorded:
                total = total.index_add(0, indices, parts)
            else:
                _add_elements(call, total, indices, parts)
        return total[:-1].view(shape).float()


def _add_gradients(
    call: _Call, rows: slice, dout: Tensor, dlse: Tensor | None, totals: Gradients
) -> None:
    chunk = _chunk(call, rows)
    lists, empty = chunk.lse.shape[0], chunk.empty

    def of_chunk(tensor: Tensor) -> Tensor:
        """Return the chunk's part of ``(rows, H, ...)``, zeros for rows without keys."""
        part = _by_list(tensor[rows].to(call.dtype), lists).contiguous()
        if empty is None:
            return part
        return part.masked_fill(empty if part.dim() == 3 else empty.unsqueeze(-1), 0)

    weights = probabilities = chunk.probabilities
    if call.inputs.sink is not None:
        key_share, sink_share = _softmax_shares(call.inputs.sink, chunk.lse)
        weights = probabilities * key_share.unsqueeze(-1)
    chunk_dout = of_chunk(dout)
    if "value" in totals:
        chunk.values.add_to(totals["value"], weights, chunk_dout)
    dscores = chunk.values.dots(chunk_dout)
    # Uses the products of dscores, so that rounding errors cancel. dout * out has other errors.
    delta = (weights * dscores).sum(-1)
    if "sink" in totals:
        totals["sink"] -= _by_row(sink_share * delta).sum(0)
    dscores.sub_(delta.unsqueeze(-1)).mul_(weights)
    if dlse is not None:
        dscores.add_(probabilities * of_chunk(dlse).unsqueeze(-1))
    if chunk.invalid is not None:
        dscores.masked_fill_(chunk.invalid, 0)
    if "index_bias" in totals:
        total = totals["index_bias"]
        total[:, rows] = _of_heads(dscores, total.shape[0])
    if "bias" in totals and chunk.bias_indices is not None:
        indices = chunk.bias_indices
        parts = _of_heads(dscores, indices.shape[0]).reshape(-1)
        _add_elements(call, totals["bias"], indices.reshape(-1), parts)
    if chunk.slope is not None:
        dscores.mul_(chunk.slope)
    if "query" in totals:
        dquery = chunk.keys.sums(dscores).mul_(call.inputs.scale)
        _by_list(totals["query"][rows], lists).copy_(dquery)
    if "key" in totals:
        chunk.keys.add_to(totals["key"], dscores, chunk.query)


def _call(inputs: KeyListInputs, is_recorded: bool) -> _Call:
    dtype = computing_dtype(inputs.query, inputs.bias)
    bias, index_bias, packed = inputs.bias, inputs.index_bias, inputs.packed
    key, value = (_table(t, dtype, is_recorded) for t in (inputs.key, inputs.value))
    rows = visible_keys(inputs)
    if max(key.shape[0], 0 if bias is None else bias.numel()) < 2**31:
        rows = VisibleKeys(*(t.to(torch.int32) for t in rows))
    if bias is not None:
        bias = torch.cat([bias.reshape(-1), bias.new_zeros(1)]).to(dtype)
    return _Call(
        inputs,
        is_recorded,
        dtype,
        inputs.query.shape[-2],
        inputs.key.shape[-2],
        rows,
        inputs.query.flatten(0, -3),
        inputs.query.new_empty(out_shape(inputs)).flatten(0, -3),
        by_head(inputs.indices, packed=packed),
        None if index_bias is None else by_head(index_bias, packed=packed),
        bias,
        key,
        value,
    )


def _table(tensor: Tensor, dtype: torch.dtype, is_recorded: bool) -> Tensor:
    by_head = tensor.flatten(0, -3).transpose(0, 1)
    if is_recorded:
        rows = by_head.to(dtype).flatten(0, 1)
        return torch.cat([rows, rows.new_zeros((1, tensor.shape[-1]))])
    table = tensor.new_empty((by_head.shape[:2].numel() + 1, tensor.shape[-1]), dtype=dtype)
    table[:-1].view(by_head.shape).copy_(by_head)
    table[-1:].zero_()
    return table


def _chunks(call: _Call) -> list[slice]:
    """Return slices that cover all rows."""
    _, rows, length = call.indices.shape
    head_dim = max(call.key.shape[-1], call.value.shape[-1])
    row = max(call.kv_heads * length * head_dim, call.heads * length * 8)
    most = _GATHERED_ON_CPU if call.query.is_cpu else _GATHERED_ELSEWHERE
    step = max(1, most // max(row, 1))
    return [slice(begin, min(begin + step, rows)) for begin in range(0, rows, step)]


def _chunk(call: _Call, rows: slice) -> _Chunk:
    inputs, heads, kv_heads = call.inputs, call.heads, call.kv_heads
    visible = VisibleKeys(*(t[rows] for t in call.rows))
    listed = call.indices[:, rows]
    valid = (listed >= 0) & (listed < visible.limit[:, None])
    listed = listed.masked_fill(~valid, 0).to(visible.begin.dtype)
    added, bias_indices = None, None
    if inputs.bias is not None and call.bias is not None:
        bias_indices = _bias_indices(inputs, visible, listed, valid)
        added = call.bias[bias_indices]
    if call.index_bias is not None:
        index_bias = call.index_bias[:, rows].to(call.dtype)
        if added is None:
            added = index_bias
        else:
            most = max(added.shape[0], index_bias.shape[0])
            added = _expanded(added, most) + _expanded(index_bias, most)
    if added is not None:
        kept = added != -torch.inf
        # A key that one head of a group drops and another keeps may be non-finite, so each head
        # needs its own list.
        if kept.shape[0] > kv_heads and call.is_readable and bool(kept.all()):
            kept = kept[:1]
        most = max(valid.shape[0], kept.shape[0])
        valid = _expanded(valid, most) & _expanded(kept, most)
    lists = max(valid.shape[0], kv_heads)
    no_key = call.key.shape[0] - 1
    head_offset = torch.arange(lists, device=listed.device, dtype=listed.dtype) // (
        lists // kv_heads
    )
    head_offset = head_offset * (no_key // kv_heads)
    key_numbers = key_rows(inputs, visible, listed)
    invalid, empty = None, None
    key_numbers = _expanded(key_numbers, lists) + head_offset[:, None, None]
    if not (call.is_readable and bool(valid.all())) or listed.shape[-1] == 0:
        valid = _expanded(valid, lists)
        key_numbers = key_numbers.masked_fill(~valid, no_key)
        invalid, empty = ~valid.unsqueeze(2), ~valid.any(-1, keepdim=True)
    query = _by_list(call.query[rows].to(call.dtype), lists).contiguous() * inputs.scale
    if empty is not None:
        query = query.masked_fill(empty.unsqueeze(-1), 0)
    keys, values = (
        Gathered(table, key_numbers, ordered=inputs.deterministic)
        for table in (call.key, call.value)
    )
    scores, slope = keys.dots(query), None
    if inputs.softcap > 0:
        tanh = torch.tanh(scores / inputs.softcap)
        scores, slope = inputs.softcap * tanh, 1 - tanh * tanh
    if added is not None:
        scores = scores + _grouped(added, lists, heads)
    if invalid is not None and empty is not None:
        # Scores of a row without keys are set to 0, because softmax and logsumexp of only -inf have
        # no gradient. The row lists the zero row of a table, so it contributes nothing.
        scores = scores.masked_fill(invalid, -torch.inf).masked_fill(empty.unsqueeze(-1), 0)
    probabilities = torch.softmax(scores, -1)
    if listed.shape[-1] == 0:
        lse = scores.new_zeros(scores.shape[:-1])
    elif call.is_recorded:
        lse = torch.logsumexp(scores, -1)
    else:  # the largest probability is exp(largest score - lse)
        largest = scores.amax(-1)
        lse = largest - torch.log(probabilities.amax(-1))
        lse = torch.where(largest == torch.inf, largest, lse)  # probabilities are NaN there
    return _Chunk(
        query,
        empty,
        invalid,
        visible,
        listed,
        valid,
        keys,
        values,
        bias_indices,
        slope,
        probabilities,
        lse,
    )


def _bias_indices(
    inputs: KeyListInputs, rows: VisibleKeys, listed: Tensor, valid: Tensor
) -> Tensor:
    """Return the index of each listed key's bias, ``(h, rows, k)``, with the heads of the bias or
    of the lists, whichever are more.
    """
    assert inputs.bias is not None
    most = max(inputs.bias.shape[-3], listed.shape[0])
    first, head_step, key_step = bias_strides(inputs, rows)
    head = torch.arange(most, device=listed.device, dtype=listed.dtype) * head_step
    indices = head[:, None, None] + (first[:, None] + _expanded(listed, most) * key_step)
    return indices.masked_fill(~_expanded(valid, most), inputs.bias.numel())


def _softmax_shares(sink: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shares of the keys and of the sink in a softmax, ``(h, rows, g)``."""
    key_share, sink_share = softmax_shares(sink, _by_row(lse).transpose(0, 1))
    lists = lse.shape[0]
    return _by_list(key_share.transpose(0, 1), lists), _by_list(sink_share.transpose(0, 1), lists)


def _by_list(tensor: Tensor, lists: int) -> Tensor:
    """View ``(rows, H, ...)`` as ``(h, rows, g, ...)``."""
    return torch.unflatten(tensor, 1, (lists, tensor.shape[1] // lists)).transpose(0, 1)


def _by_row(tensor: Tensor) -> Tensor:
    """View ``(h, rows, g, ...)`` as ``(rows, H, ...)``."""
    return tensor.transpose(0, 1).flatten(1, 2)


def _expanded(tensor: Tensor, heads: int) -> Tensor:
    """Repeat ``(h, rows, k)`` to the given number of heads."""
    count = tensor.shape[0]
    if count == 1:
        return tensor.expand(heads, -1, -1)
    return tensor if count == heads else tensor.repeat_interleave(heads // count, 0)


def _grouped(tensor: Tensor, lists: int, heads: int) -> Tensor:
    """View ``(1 | Hk | H, rows, k)`` so that it broadcasts to ``(lists, rows, g, k)``."""
    if tensor.shape[0] > lists:
        return torch.unflatten(tensor, 0, (lists, heads // lists)).transpose(1, 2)
    return _expanded(tensor, lists).unsqueeze(2)


def _of_heads(tensor: Tensor, heads: int) -> Tensor:
    """Sum ``(h, rows, g, k)`` over the query heads that share one of ``heads`` heads."""
    lists = tensor.shape[0]
    if heads <= lists:
        return torch.unflatten(tensor.sum(2), 0, (heads, lists // heads)).sum(1)
    return tensor.transpose(1, 2).flatten(0, 1)


def _add_elements(call: _Call, total: Tensor, indices: Tensor, parts: Tensor) -> None:
    if call.inputs.deterministic and not total.is_cpu:
        total.index_put_((indices,), parts, accumulate=True)
    else:
        total.index_add_(0, indices, parts)


def _to_lse_layout(lse: Tensor, inputs: KeyListInputs) -> Tensor:
    """Convert ``(rows, H)`` to the layout of lse."""
    if inputs.packed:
        return lse.transpose(0, 1).contiguous()
    batch, heads, queries = lse_shape(inputs.query)
    return lse.view(batch, queries, heads).transpose(1, 2).contiguous()


def _to_input_layout(inputs: KeyListInputs, name: str, total: Tensor) -> Tensor:
    """Return a gradient in the shape and dtype of its tensor."""
    like: Tensor = getattr(inputs, name)
    if name in ("key", "value"):
        total = torch.unflatten(total[:-1], 0, (like.shape[-2], -1)).transpose(0, 1)
    elif name == "bias":
        total = total[:-1]
    elif name == "index_bias" and not inputs.packed:
        total = torch.unflatten(total, 1, (like.shape[0], like.shape[2])).transpose(0, 1)
    return total.reshape(like.shape).to(like.dtype).contiguous()
