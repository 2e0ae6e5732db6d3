# SPDX-License-Identifier: BSD-3-Clause
"""Dynamic mask attention in plain PyTorch: the definition that every kernel is compared with.

It materializes the scores, so memory and time grow with Q x K. 16-bit and float32 inputs are
computed in float32; a float64 query or bias is computed in float64. Every result is differentiable
by autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import has_autocast
from .checks import is_one_of
from .masks import intervals_to_bool
from .record import AttentionInputs, Gradients, Packing

__all__ = ["attention_probabilities", "formula", "key_mass"]

# Most scores in memory at once for sums over rows, on CPUs and elsewhere.
_SCORES_ON_CPU, _SCORES_ELSEWHERE = 2**20, 2**26


class Sequence(NamedTuple):
    """One dense problem: a whole batch, or a single sequence of a varlen batch (then B = 1)."""

    rows: slice  # in the packed query dimension
    keys: slice  # in the packed key dimension
    query: Tensor  # (B, Q, H, D)
    key: Tensor  # (B, K, Hk, D)
    value: Tensor  # (B, K, Hk, Dv)
    mask: Tensor | None  # bool, broadcasts to (B, H, Q, K) after the head rule
    bias: Tensor | None


class Attended(NamedTuple):
    """The results of one dense problem, in the computing dtype."""

    out: Tensor  # (B, H, Q, Dv)
    lse: Tensor  # (B, H, Q), without the sink
    probabilities: Tensor  # (B, H, Q, K); with a sink, a row sums to less than 1


def formula(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)`` of `attention_reference` for a call that has been checked."""
    query = inputs.query
    parts = [(part, attend(part, inputs)) for part in sequences(inputs)]
    if not inputs.packed:
        (_, dense), *_ = parts
        return dense.out.transpose(1, 2).to(query.dtype).contiguous(), dense.lse
    out = torch.cat(
        [query.new_empty((0, query.shape[1], inputs.value.shape[-1]))]
        + [attended.out[0].transpose(0, 1).to(query.dtype) for _, attended in parts]
    )
    lse = torch.cat(
        [query.new_empty((query.shape[1], 0), dtype=computing_dtype(query, inputs.bias))]
        + [attended.lse[0] for _, attended in parts],
        dim=1,
    )
    return out, lse


def attention_probabilities(inputs: AttentionInputs) -> Tensor:
    """Return the attention probabilities ``(B, H, Q, K)`` in query's dtype.

    A packed call gives ``(B, H, max_seqlen_q, max_seqlen_k)``, zero outside each sequence.
    """
    inputs = _unpack(inputs)
    (part,) = sequences(inputs)
    return attend(part, inputs).probabilities.to(inputs.query.dtype)


def _unpack(inputs: AttentionInputs) -> AttentionInputs:
    """Return the dense call with a batch entry for each sequence, of the longest lengths.

    No value is read on the host, so that it can be compiled, and traced without values.
    """
    cu_seqlens_q, cu_seqlens_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return inputs
    # The comparisons make torch.compile (2.13) compile lengths of 0 separately. It raises where it
    # must solve an equation of their product with the number of sequences.
    row, column = (
        torch.arange(0 if max_seqlen == 0 else max_seqlen, device=inputs.query.device)
        for max_seqlen in (inputs.max_seqlen_q, inputs.max_seqlen_k)
    )
    rows, keys = cu_seqlens_q[:-1, None] + row, cu_seqlens_k[:-1, None] + column
    is_row, is_key = rows < cu_seqlens_q[1:, None], keys < cu_seqlens_k[1:, None]
    kept = is_row.unsqueeze(2) & is_key.unsqueeze(1)
    if inputs.causal:
        limit = row + (cu_seqlens_k.diff() - cu_seqlens_q.diff()).unsqueeze(1)
        kept = kept & (column <= limit.unsqueeze(2))
    kept = kept.unsqueeze(1)
    if inputs.start is not None and inputs.end is not None:
        start, end = (_gather(t, keys, 1).transpose(0, 1) for t in (inputs.start, inputs.end))
        kept = kept & intervals_to_bool(start, end, inputs.max_seqlen_q)
    if inputs.mask is not None:
        kept = kept & _dense_form(inputs.mask, rows, keys)
    key, value, key_rows = inputs.key, inputs.value, keys
    if inputs.block_table is not None:
        page_size = key.shape[1]
        pages = _gather(inputs.block_table, column // page_size, 1).long()
        key_rows = pages * page_size + column % page_size
        key, value = key.flatten(0, 1), value.flatten(0, 1)
    changed = {**Packing()._asdict(), "causal": False, "start": None, "end": None, "mask": kept}
    return inputs._replace(
        **changed,
        query=_gather(inputs.query, rows, 0),
        key=_gather(key, key_rows, 0),
        value=_gather(value, key_rows, 0),
        bias=None if inputs.bias is None else _dense_form(inputs.bias, rows, keys),
    )


def _dense_form(tensor: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """Return a packed mask or bias as ``(B, heads, Q or 1, K)``."""
    if tensor.shape[1] == 1:
        return _gather(tensor.squeeze(1), keys, 1).transpose(0, 1).unsqueeze(2)
    return _gather(tensor, rows, 1).transpose(0, 1)


def _gather(tensor: Tensor, indices: Tensor, dimension: int) -> Tensor:
    """Return what is at places of a dimension, whose shape replaces it; anything where none is."""
    before, (length, *after) = tensor.shape[:dimension], tensor.shape[dimension:]
    if length == 0:
        tensor, length = torch.cat([tensor, tensor.new_zeros((*before, 1, *after))], dimension), 1
    gathered = tensor.index_select(dimension, indices.clamp(0, length - 1).flatten())
    return gathered.view(*before, *indices.shape, *after)


def key_mass(inputs: AttentionInputs) -> Tensor:
    """Return the sum of each key's probabilities: float32 ``(B, H, K)``, or ``(H, total_k)``.

    Row chunks bound its memory. The call must have no pages and no window.
    """
    parts = [inputs.query.new_zeros((inputs.query.shape[-2], 0), dtype=torch.float32)]
    for call in _dense_calls(inputs):
        (batch, rows, heads, _), keys = call.query.shape, call.key.shape[1]
        mass = call.query.new_zeros((batch, heads, keys), dtype=torch.float32)
        most = _SCORES_ON_CPU if call.query.is_cpu else _SCORES_ELSEWHERE
        step = max(1, most // max(batch * heads * keys, 1))
        for begin in range(0, rows, step):
            chunk = _rows_of_call(call, begin, min(begin + step, rows))
            (part,) = sequences(chunk)
            sums = attend(part, chunk).probabilities.sum(2).float()
            mass = mass + torch.nn.functional.pad(sums, (0, keys - sums.shape[2]))
        if not inputs.packed:
            return mass
        parts.append(mass[0])
    packed = torch.cat(parts, 1)
    # Pad for rows of key that belong to no sequence.
    return torch.nn.functional.pad(packed, (0, inputs.key.shape[0] - packed.shape[1]))


def _dense_calls(inputs: AttentionInputs) -> Iterator[AttentionInputs]:
    """Yield a call for each sequence of a packed batch, or the call itself."""
    cu_seqlens_q, cu_seqlens_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    if cu_seqlens_q is None or cu_seqlens_k is None:
        yield inputs
        return
    q_bounds, k_bounds = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for index in range(len(q_bounds) - 1):
        rows = slice(q_bounds[index], q_bounds[index + 1])
        keys = slice(k_bounds[index], k_bounds[index + 1])
        changed: dict[str, Any] = Packing()._asdict()
        changed |= {"query": inputs.query[rows].unsqueeze(0)}
        changed |= {n: getattr(inputs, n)[keys].unsqueeze(0) for n in ("key", "value")}
        for name in ("start", "end", "mask", "bias"):
            tensor = getattr(inputs, name)
            if tensor is not None and tensor.dim() == 2:
                changed[name] = tensor[:, keys].unsqueeze(0)
            elif tensor is not None:
                changed[name] = packed_part(tensor, rows, keys)
        yield inputs._replace(**changed)


def _rows_of_call(call: AttentionInputs, begin: int, end: int) -> AttentionInputs:
    """Return the call of some rows of a dense one, with the keys that they may see."""
    keys = call.key.shape[1]
    if call.causal:  # the last row's limit must stay at the last key
        keys = max(0, keys - call.query.shape[1] + end)
    changed: dict[str, Any] = {"query": call.query[:, begin:end]}
    changed |= {name: getattr(call, name)[:, :keys] for name in ("key", "value")}
    for name in ("mask", "bias"):
        tensor = getattr(call, name)
        if tensor is not None:
            rows = slice(begin, end) if tensor.shape[2] > 1 else slice(None)
            changed[name] = tensor[:, :, rows, :keys]
    if call.start is not None and call.end is not None:
        changed |= {"start": call.start[..., :keys] - begin, "end": call.end[..., :keys] - begin}
    return call._replace(**changed)


def recorded_gradients(
    tensors: dict[str, Tensor | None],
    compute: Callable[[dict[str, Tensor | None]], tuple[Tensor, Tensor]],
    gradients: tuple[Tensor | None, Tensor | None],
    wanted: tuple[str, ...],
) -> Gradients:
    """Return the gradients of a call. Autograd can differentiate them any number of times.

    Args:
        tensors: the call's differentiable tensors, by name.
        compute: returns out and lse of such tensors.
        gradients: of out and lse.
        wanted: the names of the tensors whose gradients to return.
    """
    with torch.enable_grad():
        # Views: one tensor may be several arguments, each of which needs its own gradient.
        views = {name: None if t is None else t.view_as(t) for name, t in tensors.items()}
        # lse depends on neither value nor sink, and no result depends on what keeps no key.
        pairs = [
            (result, gradient)
            for result, gradient in zip(compute(views), gradients, strict=True)
            if gradient is not None and result.requires_grad
        ]
        found = torch.autograd.grad(
            [result for result, _ in pairs],
            [t for name in wanted if (t := views[name]) is not None],
            [gradient for _, gradient in pairs],
            create_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        return dict(zip(wanted, found, strict=True))


def computing_dtype(query: Tensor, bias: Tensor | None) -> torch.dtype:
    """Return the dtype that a call is computed in, and the dtype of lse."""
    is_float64 = torch.float64 in (query.dtype, None if bias is None else bias.dtype)
    return torch.float64 if is_float64 else torch.float32


def sequences(inputs: AttentionInputs) -> Iterator[Sequence]:
    """Yield the dense problems of a call: one, or one for each sequence of a packed batch."""
    query, key, value, bias = inputs.query, inputs.key, inputs.value, inputs.bias
    cu_seqlens_q, cu_seqlens_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    if cu_seqlens_q is None or cu_seqlens_k is None:
        mask = inputs.mask
        if inputs.start is not None and inputs.end is not None:
            mask = intervals_to_bool(inputs.start, inputs.end, query.shape[1])
        everything = slice(None)
        yield Sequence(everything, everything, query, key, value, mask, bias)
        return
    q_bounds, k_bounds = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for index in range(len(q_bounds) - 1):
        rows = slice(q_bounds[index], q_bounds[index + 1])
        keys = slice(k_bounds[index], k_bounds[index + 1])
        length = keys.stop - keys.start
        if inputs.block_table is None:
            sequence_key, sequence_value = key[keys], value[keys]
        else:
            pages = inputs.block_table[index, : -(-length // key.shape[1])].long()
            sequence_key = key[pages].flatten(0, 1)[:length]
            sequence_value = value[pages].flatten(0, 1)[:length]
        yield Sequence(
            rows,
            keys,
            query[rows].unsqueeze(0),
            sequence_key.unsqueeze(0),
            sequence_value.unsqueeze(0),
            _sequence_mask(inputs, rows, keys),
            None if bias is None else packed_part(bias, rows, keys),
        )


def attend(part: Sequence, inputs: AttentionInputs) -> Attended:
    """Compute one dense problem of a call, in full precision even under autocast."""
    with without_autocast(part.query.device.type):
        return _attend(part, inputs.scale, inputs.causal, inputs.softcap, inputs.sink)


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Return a context without autocast. It also serves device types that have no autocast."""
    if has_autocast(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def softmax_shares(sink: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys' share and the sink's share of a softmax; they sum to 1.

    Args:
        sink: ``(H,)``.
        lse: ``(B, H, Q)``, without the sink.
    """
    margin = lse - sink.to(lse.dtype).unsqueeze(-1)
    return torch.sigmoid(margin), torch.sigmoid(-margin)


def _attend(
    part: Sequence, scale: float, causal: bool, softcap: float, sink: Tensor | None
) -> Attended:
    query, key, value, kept, bias = computing_inputs(part, causal)
    row_kept = kept.any(-1)
    scores = scale * (query @ key.transpose(-1, -2))
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    # Scores of an empty row are set to 0, because softmax and logsumexp of only -inf have no
    # gradient.
    scores = scores.masked_fill(~kept, -torch.inf).masked_fill(~row_kept.unsqueeze(-1), 0)
    probabilities, lse = torch.softmax(scores, -1), torch.logsumexp(scores, -1)
    if sink is not None:
        key_share, _ = softmax_shares(sink, lse.masked_fill(~row_kept, 0))
        probabilities = probabilities * key_share.unsqueeze(-1)
    probabilities = probabilities.masked_fill(~kept, 0)
    lse = lse.masked_fill(~row_kept, -torch.inf)
    out = (probabilities @ value).masked_fill(~row_kept.unsqueeze(-1), 0)
    return Attended(out, lse, probabilities)


def computing_inputs(
    part: Sequence, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return query, key, value ``(B, H, rows, D)``, the kept pairs ``(B, H, Q, K)``, and bias, all
    floats in the computing dtype.

    Keys and values are repeated for each query head of their group. Rows that keep no key and keys
    that no row keeps are set to 0, so that their contents, NaN included, affect no result:
    0 * NaN would be NaN.
    """
    dtype = computing_dtype(part.query, part.bias)
    heads, kv_heads = part.query.shape[2], part.key.shape[2]
    query = part.query.to(dtype).transpose(1, 2)
    key, value = (
        t.to(dtype).transpose(1, 2).repeat_interleave(heads // kv_heads, 1)
        for t in (part.key, part.value)
    )
    bias = None if part.bias is None else per_query_head(part.bias, heads, kv_heads).to(dtype)
    kept = torch.ones(
        (query.shape[0], heads, query.shape[2], key.shape[2]), dtype=torch.bool, device=query.device
    )
    if causal:
        kept = kept.tril(kept.shape[3] - kept.shape[2])
    if part.mask is not None:
        kept = kept & per_query_head(part.mask, heads, kv_heads)
    if bias is not None:
        kept = kept & (bias != -torch.inf)
    query = query.masked_fill(~kept.any(3).unsqueeze(-1), 0)
    key, value = (t.masked_fill(~kept.any(2).unsqueeze(-1), 0) for t in (key, value))
    return query, key, value, kept, bias


def per_query_head(tensor: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Repeat entries per KV head for the query heads of the group."""
    if is_one_of(tensor.shape[1], 1, heads):
        return tensor
    return tensor.repeat_interleave(heads // kv_heads, 1)


def _sequence_mask(inputs: AttentionInputs, rows: slice, keys: slice) -> Tensor | None:
    if inputs.start is not None and inputs.end is not None:
        start, end = (t[:, keys].unsqueeze(0) for t in (inputs.start, inputs.end))
        return intervals_to_bool(start, end, rows.stop - rows.start)
    return None if inputs.mask is None else packed_part(inputs.mask, rows, keys)


def packed_part(tensor: Tensor, rows: slice, keys: slice) -> Tensor:
    """Return one sequence of a varlen mask or bias, which is per key or per query."""
    if tensor.shape[1] == 1:
        return tensor[:, :, keys].unsqueeze(0)
    return tensor[:, rows, : keys.stop - keys.start].unsqueeze(0)
