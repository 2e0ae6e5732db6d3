# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of short sequences, whose thread blocks are clusters on Hopper.

With deterministic=True and up to 256 keys, the key blocks of a head pass dq on to each other.
Otherwise some thread blocks share the query heads and row tiles of a key block.
"""

from __future__ import annotations

import pytest

from drawn.calls import Call, assert_same_bits
from drawn.judge import expected
from support import HALF_TYPES, Target

from .kinds import Draw, dense, random_intervals, with_dropped_keys

# "as_many": a ring. "fewer_queries": fewer row tiles than key blocks; if causal, all rows see some
# keys. "more_queries": more row tiles; if causal, some rows see no key.
LENGTHS = {
    "as_many": ((1, 256), None),
    "fewer_queries": ((1, 100), (150, 256)),
    "more_queries": ((300, 600), (1, 256)),
}


def draw_call(draw: Draw, lengths: str, form: str, group: int) -> Call:
    queries, keys = LENGTHS[lengths]
    if keys is None:
        queries = keys = (draw.size(*queries),) * 2
    call, sizes = dense(
        draw, batch=(1, 2), queries=queries, keys=keys, kv_heads=(1, 2), group=(group, group)
    )
    call.causal = form != "all_keys"
    if form == "window":
        call.window = sizes.keys // 8 + draw.size(1, sizes.keys)
        call.bias = draw.randn(sizes.batch, sizes.kv_heads, 1, sizes.keys)
        return with_dropped_keys(draw, call)
    if form == "intervals":
        call.mask = random_intervals(draw, (sizes.batch, sizes.kv_heads, sizes.keys), sizes.queries)
        call.softcap = 3.0
        return with_dropped_keys(draw, call)
    return call


@pytest.mark.parametrize("head_dim", [32, 64])
@pytest.mark.parametrize("form", ["all_keys", "causal", "window", "intervals"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_chain(form: str, lengths: str, head_dim: int, pack_target: Target, seed: int) -> None:
    call = draw_call(Draw(seed, HALF_TYPES[seed % 2], head_dim), lengths, form, 1)
    call = call.to(pack_target.device)
    got = call.results(deterministic=True)
    expected(call).check(got)
    assert_same_bits(call.results(deterministic=True), got)


@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize("form", ["all_keys", "causal", "window", "intervals"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_shared_steps(form: str, lengths: str, group: int, pack_target: Target, seed: int) -> None:
    call = draw_call(Draw(seed, HALF_TYPES[seed % 2], 64), lengths, form, group)
    call = call.to(pack_target.device)
    expected(call).check(call.results())
