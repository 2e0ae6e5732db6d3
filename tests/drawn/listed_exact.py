# SPDX-License-Identifier: BSD-3-Clause
"""The functions of exact.py for calls with key lists."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .calls import Call
from .listed_rows import Rows, added, kept_places, of_rows, sequences
from .parts import Part, Terms


def parts(call: Call) -> Iterator[Part]:
    """Split a call into problems of one query each; a sequence is one batch."""
    heads = call.query.shape[-2]
    group = heads // call.key.shape[-2]
    for rows in sequences(call):
        if rows.rows.start == rows.rows.stop:
            continue
        kept = kept_places(call, rows).transpose(0, 1).unsqueeze(2)  # (Q, H, 1, k)
        empty = ~kept.any(3)
        query = of_rows(call, rows, "query").double().masked_fill(empty, 0).unsqueeze(2)
        places = rows.indices.transpose(0, 1)
        spoiled = ~query.isfinite().all(3).all(2)
        states = []
        for name in ("key", "value"):
            own = of_rows(call, rows, name).double()
            own = torch.cat([own, own.new_zeros((1, *own.shape[1:]))])  # no key may exist
            own = own.repeat_interleave(group, 1).transpose(0, 1)  # (H, K + 1, D)
            own = own[torch.arange(heads, device=own.device)[:, None], places]
            own = own.masked_fill(~kept.transpose(2, 3), 0)
            spoiled |= ~own.isfinite().all(3).all(2)
            states.append(own.nan_to_num(0, 0, 0))
        biases = [b.double().transpose(0, 1) for b in added(call, rows) if b is not None]
        bias = None
        if biases:
            bias = torch.where(kept, torch.stack(biases).sum(0).unsqueeze(2), 0.0)
        dout = of_rows(call, rows, "dout").double().unsqueeze(2)
        dlse = of_rows(call, rows, "dlse").double().unsqueeze(2)
        dout = dout.masked_fill(empty.unsqueeze(3), 0) * float("out" in call.of)
        dlse = dlse.masked_fill(empty, 0) * float("lse" in call.of)
        scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
        sink = None if call.sink is None else call.sink.detach().double()
        query = query.nan_to_num(0, 0, 0)
        yield Part(rows, query, *states, bias, kept, spoiled, dout, dlse, scale, sink)


def add(sums: dict[str, Tensor], call: Call, part: Part, some: Terms) -> None:
    """Add the terms of a part to the sums of a call's results."""
    rows, kv_heads = part.sequence, call.key.shape[-2]
    assert isinstance(rows, Rows)

    def own(name: str) -> Tensor:
        return sums[name] if rows.packed else sums[name][rows.number % len(sums[name])]

    def to_keys(terms: Tensor, heads: int) -> Tensor:
        """Sum (Q, H, k, ...) to (heads, K, ...) one by one."""
        count, sizes = rows.keys.stop - rows.keys.start, terms.shape[3:]
        places = rows.indices.unflatten(0, (heads, -1)).flatten(1)
        places = places.view(*places.shape, *[1] * len(sizes)).expand(*places.shape, *sizes)
        total = terms.new_zeros((heads, count + 1, *sizes))
        by_head = terms.transpose(0, 1).unflatten(0, (heads, -1)).flatten(1, 3)
        return total.scatter_add_(1, places, by_head)[:, :count]

    own("lse")[:, rows.rows] += some.lse.squeeze(2).T
    if "mass" in sums:
        own("mass")[:, rows.keys] += to_keys(some.mass, some.mass.shape[1])
    for name, tensor in (("out", some.out), ("dquery", some.dquery)):
        if name in sums:
            own(name)[rows.rows] += tensor.squeeze(2)
    for name, tensor in (("dkey", some.dkey), ("dvalue", some.dvalue)):
        if name in sums:
            own(name)[rows.keys] += to_keys(tensor, kv_heads).transpose(0, 1)
    if "dsink" in sums:
        sums["dsink"] += some.dsink
    ds = some.dbias.squeeze(2)
    if "dbias" in sums:
        total = own("dbias")
        total[:, 0, rows.keys] += to_keys(ds, len(total))
    if "dindex_bias" in sums:
        total = own("dindex_bias")
        total[:, rows.rows] += ds.transpose(0, 1).unflatten(0, (len(total), -1)).sum(1)


def widen(bounds: dict[str, Tensor], added: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Allow for the error of a float32 sum of many terms: each term adds 2^-24 of the total.

    All lists may name one key. The bound of a term is at least 2^-18 of it already.
    """
    names = ("dkey", "dvalue", "dbias", "mass") if dtype == torch.float32 else ("mass",)
    for name in names:
        if name in bounds:
            bounds[name] *= (added[name] / 64).clamp(min=1)
