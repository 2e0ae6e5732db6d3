# SPDX-License-Identifier: BSD-3-Clause
"""Calls with so many heads, sequences or keys that kernels number their work in groups.

The work of a thread block depends on these numbers, which are small in drawn calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from drawn.calls import Call
from drawn.judge import expected
from support import Target, cotangent

from .kinds import Draw, assert_right, bounds, random_intervals

DTYPE, HEAD_DIM = torch.bfloat16, 64


def whole(
    draw: Draw, batch: int, kv_heads: int, group: int, queries: int, keys: int, bias: bool = False
) -> Call:
    """Draw a call whose tensors all have the full batch."""
    rows = (batch, queries, kv_heads * group, HEAD_DIM)
    columns = (batch, keys, kv_heads, HEAD_DIM)
    dout, dlse = cotangent(draw.randn(*rows)), draw.randn(batch, rows[2], queries)
    call = Call(draw.randn(*rows), draw.randn(*columns), draw.randn(*columns), dout, dlse.float())
    if bias:
        call.bias = draw.randn(batch, kv_heads, 1, keys)
    return call


def few_mask(draw: Draw, call: Call, kept: int, every: int = 1) -> Tensor:
    """Keep some keys of every ``every``-th sequence, and none of the others."""
    mask = torch.zeros(len(call.key), 1, 1, call.key.shape[1], dtype=torch.bool)
    for number, own in enumerate(mask):
        if number % every == 0:
            own[..., draw.permuted(list(range(own.shape[-1])))[:kept]] = True
    return mask


def short_keys(draw: Draw) -> Call:
    """A head has few key blocks, and the heads form several groups."""
    return whole(draw, 13, 17, 1, 64, draw.size(245, 256))


def causal_short_keys(draw: Draw) -> Call:
    call = short_keys(draw)
    call.causal = True
    return call


def one_block(draw: Draw) -> Call:
    call = whole(draw, 47, 15, 1, 64, draw.size(50, 64), bias=True)  # whole row tiles
    call.causal, call.softcap = True, 4.0
    return call


def window(draw: Draw) -> Call:
    """Row segments with an order of key blocks for each list."""
    call = whole(draw, 11, 5, 1, draw.size(257, 290), 1024, bias=True)
    call.causal, call.window = True, draw.shapes.choice([20, 90])
    return call


def segments(draw: Draw) -> Call:
    """Whole key blocks that a segment's rows keep come first. The last segment has one row."""
    call = whole(draw, 1, 2, 1, 513, 513, bias=True)
    call.causal, call.window = True, draw.size(200, 250)
    return call


def long_lists(draw: Draw) -> Call:
    """Segments of lists that are too long for one thread block to select."""
    call = whole(draw, 11, 1, 1, draw.size(20, 60), draw.size(4500, 4600), bias=True)
    call.causal, call.window = True, 90
    return call


def short_keys_of_many_tiles(draw: Draw) -> Call:
    """Thread blocks divide the tiles of a list."""
    call = whole(draw, 1, 2, 1, draw.size(1100, 1200), draw.size(100, 200))
    call.mask = random_intervals(draw, (1, 2, call.key.shape[1]), call.query.shape[1])
    return call


def key_mask(draw: Draw) -> Call:
    """Lists of kept keys; only some sequences form a group of row tiles."""
    call = whole(draw, 9, 5, 1, draw.size(129, 140), 2048, bias=True)
    call.mask, call.causal = few_mask(draw, call, 40), True
    return call


def two_buckets(draw: Draw) -> Call:
    """More kept keys in a list than one bucket orders."""
    call = whole(draw, 1, 1, 1, draw.size(20, 100), draw.size(2400, 3000), bias=True)
    call.mask = few_mask(draw, call, call.key.shape[1] - 40)
    return call


def dead_tiles(draw: Draw) -> Call:
    """A mask with rows that leaves most of the many tiles empty, and some with a single pair."""
    call = whole(draw, 1, 1, 2, draw.size(140, 200), 16 * draw.size(130, 140))
    queries, keys = call.query.shape[1], call.key.shape[1]
    call.bias = draw.randn(1, 1, queries, keys)
    call.mask = torch.zeros(1, 1, queries, keys, dtype=torch.bool)
    call.mask[..., 64:200] = draw.kept(queries, 136)
    for _ in range(3):
        call.mask[..., draw.size(0, queries - 1), draw.size(300, keys - 1)] = True
    return call


def groups_of_nine(draw: Draw) -> Call:
    """One query with more heads in a group than a thread block takes, and no multiple of it."""
    return whole(draw, 3, 2, 9 * draw.size(1, 2), 1, draw.size(60, 200))


def long_decode(draw: Draw) -> Call:
    """One query of few heads; clusters share its keys. A large bias makes some keys dominate."""
    call = whole(draw, 2, 1, 4, 1, draw.size(17000, 20000), bias=True)
    call.bias *= 5
    return call


def listed_decode(draw: Draw) -> Call:
    """The keys that warps list at a time, and a few more."""
    call = whole(draw, 3, 2, 1, 1, 4096 + draw.size(1, 15))
    call.mask = few_mask(draw, call, 40)
    call.mask[..., 4096:] = True
    return call


def parted_decode(draw: Draw) -> Call:
    """The keys of each sequence are divided over blocks without a cluster."""
    call = whole(draw, 2, 1, 4, 3, draw.size(2100, 2500))
    call.causal = True
    return call


def biased_decode(draw: Draw) -> Call:
    """A bias row for each query drops keys; their values are NaN."""
    call = whole(draw, 2, 2, 1, 3, draw.size(100, 300))
    call.bias = draw.randn(2, 1, 3, call.key.shape[1])
    dropped = draw.kept(call.key.shape[1], density=0.3)
    call.bias[..., dropped] = -torch.inf
    call.value[:, dropped] = torch.nan
    return call


Form = Callable[[Draw], Call]
FORMS: list[Form] = [
    short_keys,
    causal_short_keys,
    one_block,
    window,
    segments,
    long_lists,
    short_keys_of_many_tiles,
    key_mask,
    two_buckets,
    dead_tiles,
]
FORWARD_FORMS: list[Form] = [
    groups_of_nine,
    long_decode,
    listed_decode,
    parted_decode,
    biased_decode,
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_batches(form: Form, deterministic: bool, pack_target: Target, seed: int) -> None:
    assert_right(form(Draw(seed, DTYPE)), pack_target, deterministic=deterministic)


@pytest.mark.parametrize("form", FORWARD_FORMS, ids=lambda form: form.__name__)
def test_forward_passes(form: Form, pack_target: Target, seed: int) -> None:
    call = form(Draw(seed, DTYPE))
    call.wanted = ()
    assert_right(call, pack_target, deterministic=False)


def test_asked_tiles(pack_target: Target, seed: int) -> None:
    """Dynamically scheduled tiles, most of them empty. Heads repeat with period 2."""
    draw, times = Draw(seed, DTYPE), (1, 1, 8, 1)
    two = whole(draw, 25, 2, 1, 17, draw.size(1024, 1040)).to(pack_target.device)
    two.mask = few_mask(draw, two, 20, every=6).to(pack_target.device)
    two.wanted = ()
    query, key, value = (tensor.repeat(times) for tensor in (two.query, two.key, two.value))
    got, want = dataclasses.replace(two, query=query, key=key, value=value).results(), expected(two)
    for out, lse in zip(got["out"].split(2, 2), got["lse"].split(2, 1), strict=True):
        want.check({"out": out, "lse": lse})


def packed(draw: Draw, queries: list[int], keys: list[int], group: int = 1) -> Call:
    rows, columns = (sum(queries), 2 * group, HEAD_DIM), (sum(keys), 2, HEAD_DIM)
    return Call(
        draw.randn(*rows),
        draw.randn(*columns),
        draw.randn(*columns),
        cotangent(draw.randn(*rows)),
        draw.randn(2 * group, rows[0]).float(),
        cu_seqlens_q=bounds(queries),
        cu_seqlens_k=bounds(keys),
        longest=(max(queries), max(keys)),
    )


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(
    causal: bool, deterministic: bool, pack_target: Target, seed: int
) -> None:
    """More sequences than a warp has lanes; some are empty."""
    draw = Draw(seed, DTYPE)
    lengths = [draw.shapes.choice([0, *range(1, 140, 6)]) for _ in range(70)]
    call = packed(draw, lengths, lengths)
    call.causal = causal
    assert_right(call, pack_target, deterministic=deterministic)


def packed_parts(draw: Draw) -> Call:
    """The rows of several key blocks are divided, and so are the rows of a head's dsink sum."""
    call = packed(draw, [draw.size(1500, 1600), 20], [draw.size(200, 250), 10], group=2)
    call.sink = draw.randn(4)
    return call


def packed_lists(draw: Draw) -> Call:
    """Lists so long that blocks count keys in chunks; each chunk keeps its first key."""
    call = packed(draw, [draw.size(20, 60), 30], [draw.size(16500, 17000), 3000])
    call.mask = random_intervals(draw, (2, len(call.key)), 60)
    call.mask.end[:, draw.kept(len(call.key), density=0.95)] = -1
    call.mask.start[:, ::1024], call.mask.end[:, ::1024] = 0, 60
    return call


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("form", [packed_parts, packed_lists], ids=lambda form: form.__name__)
def test_long_packed_sequences(
    form: Form, deterministic: bool, pack_target: Target, seed: int
) -> None:
    assert_right(form(Draw(seed, DTYPE)), pack_target, deterministic=deterministic)
