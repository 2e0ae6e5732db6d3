# SPDX-License-Identifier: BSD-3-Clause
"""Calls of so many heads, sequences or keys that kernels number their work in groups.

Which blocks of threads work on what follows from these numbers, of which drawn calls have few.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from drawn.buffers import poisoned_buffers
from drawn.calls import Call
from drawn.judge import expected
from support import Target, cotangent

from .kinds import Draw, bounds

DTYPE, HEAD_DIM = torch.bfloat16, 64


def whole(
    draw: Draw, batch: int, kv_heads: int, group: int, queries: int, keys: int, bias: bool = False
) -> Call:
    """Draw a call whose tensors all have the batch."""
    rows = (batch, queries, kv_heads * group, HEAD_DIM)
    columns = (batch, keys, kv_heads, HEAD_DIM)
    dout, dlse = cotangent(draw.randn(*rows)), draw.randn(batch, rows[2], queries)
    call = Call(draw.randn(*rows), draw.randn(*columns), draw.randn(*columns), dout, dlse.float())
    if bias:
        call.bias = draw.randn(batch, kv_heads, 1, keys)
    return call


def few_mask(draw: Draw, call: Call, kept: int, every: int = 1) -> Tensor:
    """Keep some keys of every such sequence, and none of the others."""
    mask = torch.zeros(len(call.key), 1, 1, call.key.shape[1], dtype=torch.bool)
    for number, own in enumerate(mask):
        if number % every == 0:
            own[..., draw.permuted(list(range(own.shape[-1])))[:kept]] = True
    return mask


def short_keys(draw: Draw) -> Call:
    """Blocks of keys of a head are few, and those of all heads do not go together."""
    return whole(draw, 13, 17, 1, 64, draw.size(245, 256))


def causal_short_keys(draw: Draw) -> Call:
    call = short_keys(draw)
    call.causal = True
    return call


def one_block(draw: Draw) -> Call:
    call = whole(draw, 47, 15, 1, 64, draw.size(50, 64), bias=True)  # whole tiles of rows
    call.causal, call.softcap = True, 4.0
    return call


def window(draw: Draw) -> Call:
    """Segments of rows, whose blocks of keys are ordered for each list."""
    call = whole(draw, 11, 5, 1, draw.size(257, 290), 1024, bias=True)
    call.causal, call.window = True, draw.shapes.choice([20, 90])
    return call


def key_mask(draw: Draw) -> Call:
    """Lists of kept keys; and tiles of rows, of which only some sequences go together."""
    call = whole(draw, 9, 5, 1, draw.size(129, 140), 2048, bias=True)
    call.mask, call.causal = few_mask(draw, call, 40), True
    return call


def two_buckets(draw: Draw) -> Call:
    """More kept keys of a list than are ordered together."""
    call = whole(draw, 1, 1, 1, draw.size(20, 100), draw.size(2400, 3000), bias=True)
    call.mask = few_mask(draw, call, call.key.shape[1] - 40)
    return call


def dead_tiles(draw: Draw) -> Call:
    """A mask of rows that leaves most tiles of so many keys nothing, and some a single pair."""
    call = whole(draw, 1, 1, 2, draw.size(140, 200), 16 * draw.size(130, 140))
    queries, keys = call.query.shape[1], call.key.shape[1]
    call.bias = draw.randn(1, 1, queries, keys)
    call.mask = torch.zeros(1, 1, queries, keys, dtype=torch.bool)
    call.mask[..., 64:200] = draw.kept(queries, 136)
    for _ in range(3):
        call.mask[..., draw.size(0, queries - 1), draw.size(300, keys - 1)] = True
    return call


def asked_tiles(draw: Draw) -> Call:
    """Tiles that blocks of threads ask for; most keep nothing."""
    call = whole(draw, 25, 16, 1, 17, draw.size(1024, 1040))
    call.mask = few_mask(draw, call, 20, every=6)
    return call


def groups_of_nine(draw: Draw) -> Call:
    """One query of more heads than a block of threads has, which are no multiple of those."""
    return whole(draw, 3, 2, 9 * draw.size(1, 2), 1, draw.size(60, 200))


def long_decode(draw: Draw) -> Call:
    """One query of few heads, whose keys clusters of blocks share."""
    return whole(draw, 2, 1, 4, 1, draw.size(17000, 20000))


Form = Callable[[Draw], Call]
FORMS: list[Form] = [
    short_keys,
    causal_short_keys,
    one_block,
    window,
    key_mask,
    two_buckets,
    dead_tiles,
]
FORWARD_FORMS: list[Form] = [asked_tiles, groups_of_nine, long_decode]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_batches(form: Form, deterministic: bool, pack_target: Target, seed: int) -> None:
    assert_right(form(Draw(seed, DTYPE)), pack_target, deterministic=deterministic)


@pytest.mark.parametrize("form", FORWARD_FORMS, ids=lambda form: form.__name__)
def test_forward_passes(form: Form, pack_target: Target, seed: int) -> None:
    call = form(Draw(seed, DTYPE))
    call.wanted = ()
    assert_right(call, pack_target, deterministic=False)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(
    causal: bool, deterministic: bool, pack_target: Target, seed: int
) -> None:
    """More than a warp has lanes, some of them empty."""
    draw = Draw(seed, DTYPE)
    lengths = [draw.shapes.choice([0, *range(1, 140, 6)]) for _ in range(70)]
    rows = (sum(lengths), 2, HEAD_DIM)
    call = Call(
        *(draw.randn(*rows) for _ in range(3)),
        cotangent(draw.randn(*rows)),
        draw.randn(2, rows[0]).float(),
        causal=causal,
        cu_seqlens_q=bounds(lengths),
        cu_seqlens_k=bounds(lengths),
        longest=(max(lengths), max(lengths)),
    )
    assert_right(call, pack_target, deterministic=deterministic)


def assert_right(call: Call, target: Target, *, deterministic: bool) -> None:
    """Compare all results with float64, and see that every one has been written."""
    call = call.to(target.device)
    with poisoned_buffers() as buffers:
        got = call.results(deterministic=deterministic)
    assert buffers.guards_are_whole(), "bytes beside a buffer have been written"
    expected(call).check(got)
