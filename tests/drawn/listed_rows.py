# SPDX-License-Identifier: BSD-3-Clause
"""The inputs of rows in calls with key lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flash_dmattn.reference import per_query_head

from .calls import Call


class Rows(NamedTuple):
    """Some rows with key lists in one sequence."""

    number: int  # of the sequence
    packed: bool
    rows: slice
    keys: slice
    indices: Tensor  # (H, Q, k), 0 where the index is no key
    listed: Tensor  # bool, True where the index is a key


def sequences(call: Call) -> Iterator[Rows]:
    """Split a call into sequences."""
    assert call.indices is not None
    heads, kv_heads = call.query.shape[-2], call.key.shape[-2]
    is_packed = call.cu_seqlens_q is not None

    def rows(number: int, queries: slice, keys: slice, lists: Tensor) -> Rows:
        own = per_query_head(lists[None, :, queries], heads, kv_heads)[0]
        own = own.expand(heads, *own.shape[1:]).long()
        count = keys.stop - keys.start
        listed = (own >= 0) & (own < count)
        if call.causal:
            place = torch.arange(own.shape[1], device=own.device)[:, None]
            listed &= own <= place + count - own.shape[1]
        return Rows(number, is_packed, queries, keys, own.where(listed, 0), listed)

    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        for batch in range(call.query.shape[0]):
            whole = slice(0, call.query.shape[1]), slice(0, call.key.shape[1])
            yield rows(batch, *whole, call.indices[batch])
        return
    sides = [side.tolist() for side in (call.cu_seqlens_q, call.cu_seqlens_k)]
    for number in range(len(sides[0]) - 1):
        own = (slice(side[number], side[number + 1]) for side in sides)
        yield rows(number, *own, call.indices)


def of_rows(call: Call, rows: Rows, name: str) -> Tensor:
    """Return a tensor's part for some rows, or for their keys, by row or key and by head."""
    tensor: Tensor = getattr(call, name)
    is_of_keys = name in ("key", "value")
    if is_of_keys and call.block_table is not None:
        pages = tensor[call.block_table[rows.number].long()].flatten(0, 1)
        return pages[: rows.keys.stop - rows.keys.start]
    if not rows.packed:
        tensor = tensor[rows.number]
    if name == "dlse":
        tensor = tensor.T
    return tensor[rows.keys if is_of_keys else rows.rows]


def added(call: Call, rows: Rows) -> tuple[Tensor | None, Tensor | None]:
    """Return the key bias and the index bias of each place (H, Q, k)."""
    heads, kv_heads = call.query.shape[-2], call.key.shape[-2]
    bias, index_bias = call.bias, call.index_bias
    if bias is not None:
        own = bias.detach() if rows.packed else bias.detach()[rows.number % bias.shape[0]]
        own = per_query_head(own[None, :, 0, rows.keys], heads, kv_heads)[0]
        own = own.expand(heads, -1)
        own = torch.cat([own, own.new_zeros((heads, 1))], 1)  # the sequence may have no key
        bias = own.unsqueeze(1).expand(-1, rows.indices.shape[1], -1).gather(2, rows.indices)
    if index_bias is not None:
        own = index_bias.detach() if rows.packed else index_bias.detach()[rows.number]
        index_bias = per_query_head(own[None, :, rows.rows], heads, kv_heads)[0]
        index_bias = index_bias.expand(rows.indices.shape)
    return bias, index_bias


def kept_places(call: Call, rows: Rows) -> Tensor:
    """Return bool (H, Q, k): the places of a key without a bias of -inf."""
    kept = rows.listed
    for bias in added(call, rows):
        if bias is not None:
            kept = kept & (bias != -torch.inf)
    return kept
