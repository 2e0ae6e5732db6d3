# SPDX-License-Identifier: BSD-3-Clause
"""Drawn calls whose queries list their keys."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from support import HALF_TYPES

from .calls import GRADIENT_OF, Call
from .listed_rows import Rows, kept_places, of_rows, sequences
from .problems import (
    Drawn,
    bounds,
    change_width,
    cut_into_pages,
    draw_scores,
    draw_sink,
    draw_tensors,
    draw_threads,
)
from .sizes import Sizes, draw_sizes
from .source import Source, strided

LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 33, 63, 64, 65, 127, 128, 129, 200, 257, 400)
# Numbers of a tensor that has a row of K for each place of each list.
MOST_GATHERED = 3e6
POISON = (torch.nan, torch.nan, torch.inf, -torch.inf)
NO_KEYS = (-1, -1, -(2**31), 2**31 - 1)


def draw_listed(
    seed: int,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, *HALF_TYPES),
    *,
    small: bool = False,
) -> Drawn:
    """Draw a call whose queries list their keys; the arguments are those of `problems.draw`."""
    source = Source(seed)
    dtype = source.choice(dtypes)
    while True:
        sizes = draw_sizes(source, small=small)
        if source.chance(0.3):  # so many heads of a group have kernels of their own
            sizes = dataclasses.replace(sizes, kv_heads=1, group=source.choice([16, 20, 64, 130]))
        length = source.weighted({source.choice(LENGTHS): 12, source.integer(1, 400): 4, 0: 0.2})
        batch = 1 if sizes.packed else sizes.batch
        if batch * sizes.queries * sizes.heads * length * sizes.head_dim <= MOST_GATHERED:
            break
    if not small:
        sizes, length = _with_many_keys(seed, sizes, length)
    call = draw_tensors(source, sizes, dtype)
    change_width(seed, call)
    draw_scores(source, call)
    if sizes.packed:
        call.cu_seqlens_q, call.cu_seqlens_k = bounds(sizes.q_lengths), bounds(sizes.k_lengths)
        call.longest = (max(sizes.q_lengths), max(sizes.k_lengths))
    call.indices = _draw_lists(source, sizes, length)
    call.bias = _draw_bias(source, sizes, dtype)
    if source.chance(0.5):
        heads = source.choice([1, sizes.kv_heads, sizes.heads])
        call.index_bias = _values(source, (*_lead(sizes), heads, sizes.queries, length), dtype)
    if source.chance(0.25):
        call.sink = draw_sink(source, sizes.heads, dtype)
    paged = sizes.packed and source.chance(0.2)
    call.wanted = (*GRADIENT_OF, "index_bias")
    if source.chance(0.25) or paged:
        call.wanted = () if paged else tuple(source.some(call.wanted))
    call.of = source.weighted({("out", "lse"): 4, ("out",): 2, ("lse",): 1})
    poisoned = _poison(source, call)
    for name in (*call.wanted, "dout", "dlse", "indices"):
        if isinstance(tensor := getattr(call, name), Tensor):
            setattr(call, name, strided(source, tensor))
    if paged:
        cut_into_pages(source, call, sizes)
    drawn = Drawn(
        seed,
        call,
        poisoned,
        planned=False,
        selected=False,
        deterministic=source.chance(0.2),
        probabilities=False,
        poisoned_buffers=source.chance(0.15),
        threads=draw_threads(source),
    )
    call.key_mass = not paged and source.chance(0.15)
    return drawn


def _with_many_keys(seed: int, sizes: Sizes, length: int) -> tuple[Sizes, int]:
    """Give some calls more keys than L2 holds sums of; all else is drawn as without it."""
    source = Source(seed + 2**41)
    if not source.chance(0.02):
        return sizes, length
    head_dim, keys = source.choice([(64, 82_000), (128, 41_000), (256, 20_500)])
    k_lengths = [*sizes.k_lengths[:-1], keys + source.integer(0, 2000)]
    q_lengths = [0] * (len(k_lengths) - 1) + [source.integer(1, 2)]
    changed = {"kv_heads": source.integer(1, 2), "group": source.choice([1, 4, 24])}
    sizes = dataclasses.replace(
        sizes, q_lengths=q_lengths, k_lengths=k_lengths, head_dim=head_dim, batch=1, **changed
    )
    return sizes, source.integer(512, 1200)


def _lead(sizes: Sizes) -> tuple[int, ...]:
    return () if sizes.packed else (sizes.batch,)


def _draw_lists(source: Source, sizes: Sizes, length: int) -> Tensor:
    """Draw lists of some of the keys, some of which are no keys."""
    most = max(1, *sizes.k_lengths)
    some = torch.tensor(source.permutation(most), dtype=torch.int32)
    some = some[: max(1, round(most * source.choice([0.05, 0.3, 0.7, 1.0])))]
    shape = (*_lead(sizes), source.choice([1, sizes.kv_heads]), sizes.queries, length)
    kind = source.weighted({"any": 3, "once": 3, "same": 1, "sorted": 1})
    if kind == "once":
        order = torch.rand((*shape[:-1], max(length, len(some))), generator=source.generator)
        places = order.argsort(-1)[..., :length] % len(some)
    else:
        places = source.integers(0, len(some), *shape).long()
    if kind == "same" and length > 0:
        places = places[..., :1].expand(shape)
    lists = some[places].contiguous()
    if kind == "sorted":
        lists = lists.sort(-1).values
    lists[source.kept(shape, source.weighted({0.0: 3, 0.1: 2, 0.6: 1}))] = source.choice(NO_KEYS)
    lists[source.kept((*shape[:-1], 1), source.weighted({0.0: 3, 0.1: 1})).expand(shape)] = -1
    return lists


def _draw_bias(source: Source, sizes: Sizes, dtype: torch.dtype) -> Tensor | None:
    if source.chance(0.4):
        return None
    lead = () if sizes.packed else (source.choice([1, sizes.batch]),)
    heads = source.choice([1, sizes.kv_heads, sizes.heads])
    return _values(source, (*lead, heads, 1, sizes.keys), dtype)


def _values(source: Source, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    bias = source.randn(*shape) * source.weighted({1.0: 6, 20.0: 1, 0.0: 0.5})
    dropped = source.kept(shape, source.weighted({0.0: 3, 0.1: 2, 0.6: 1}))
    dtypes = [dtype, dtype, torch.float32]
    return bias.masked_fill(dropped, -torch.inf).to(source.choice(dtypes))


def _poison(source: Source, call: Call) -> list[str]:
    """Poison what nothing may see, in place: keys that are listed nowhere, for example."""
    share = source.weighted({0.0: 2, 0.3: 2, 1.0: 4})
    if not share:
        return []
    kinds = source.some(["key", "value", "query", "bias", "index_bias", "gradients"])
    of_heads, kv_heads = source.chance(0.25), call.key.shape[-2]
    seen_bias = None if call.bias is None else torch.zeros(call.bias.shape, dtype=torch.bool)
    for rows in sequences(call):
        kept, count = kept_places(call, rows), rows.keys.stop - rows.keys.start
        listed = _by_key(rows, rows.listed, count)
        read = _by_key(rows, kept, count).unflatten(0, (kv_heads, -1))
        by_none, by_some = ~read.any(1).T, (read.any(1) & ~read.all(1)).T
        for name in ("key", "value"):
            flags = by_none & source.kept(by_none.shape, share if name in kinds else 0.0)
            if of_heads:
                flags |= by_some & source.kept(by_some.shape, 0.1)
            _fill(source, of_rows(call, rows, name), flags.unsqueeze(-1))
        empty = ~kept.any(-1).T
        if "query" in kinds:
            _fill(source, of_rows(call, rows, "query"), empty.unsqueeze(-1))
        if "gradients" in kinds:
            _fill(source, of_rows(call, rows, "dout"), empty.unsqueeze(-1))
            _fill(source, of_rows(call, rows, "dlse"), empty)
        if "index_bias" in kinds and call.index_bias is not None:
            own = call.index_bias if rows.packed else call.index_bias[rows.number]
            own = own[:, rows.rows]
            _fill(source, own, ~_of_heads(rows.listed, own.shape[0]))
        if seen_bias is not None:
            own = seen_bias if rows.packed else seen_bias[rows.number % seen_bias.shape[0]]
            own = own[:, 0, rows.keys]
            own |= _of_heads(listed, own.shape[0])
    if "bias" in kinds and call.bias is not None:
        _fill(source, call.bias, ~seen_bias)
    return [*kinds, "heads"] if of_heads else kinds


def _by_key(rows: Rows, flags: Tensor, count: int) -> Tensor:
    """Return for each head and key whether a place that names it is flagged."""
    total = torch.zeros((flags.shape[0], count + 1), dtype=torch.int32)
    total.scatter_add_(1, rows.indices.flatten(1), flags.int().flatten(1))
    return total[:, :count] > 0


def _of_heads(flags: Tensor, heads: int) -> Tensor:
    """Return whether any of the query heads that share one of so many is flagged."""
    return flags.unflatten(0, (heads, -1)).any(1)


def _fill(source: Source, tensor: Tensor, flags: Tensor) -> None:
    tensor.masked_fill_(flags, source.choice(POISON))
