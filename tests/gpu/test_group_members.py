# SPDX-License-Identifier: BSD-3-Clause
"""Query heads of a group with their own kept keys or bias: a backward pass for each."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from drawn.calls import Call
from drawn.many import Limits
from flash_dmattn import loader
from support import Target, cotangent

from .kinds import Draw, assert_right, bounds, random_intervals

KV_HEADS, GROUP = 2, 3
HEADS = KV_HEADS * GROUP
# Rows x keys for each SM from which the route divides a call.
PAIRS = 1 << 20
Form = Callable[[Draw, Call], None]


def dense(draw: Draw, pairs: int, batch: int = 2) -> Call:
    rows = math.isqrt(pairs // (batch * KV_HEADS)) + draw.size(1, 40)
    queries = (batch, rows, HEADS, draw.head_dim)
    keys = (batch, rows, KV_HEADS, draw.head_dim)
    dout, dlse = cotangent(draw.randn(*queries)), draw.randn(batch, HEADS, rows)
    return Call(draw.randn(*queries), draw.randn(*keys), draw.randn(*keys), dout, dlse.float())


def packed(draw: Draw, pairs: int) -> Call:
    whole = dense(draw, 2 * pairs, batch=1)  # the longest sequence has at least half of the rows
    total = whole.query.shape[1]
    first = draw.size(total // 4, total // 2)
    lengths = [first, 0, total - first]
    call = Call(whole.query[0], whole.key[0], whole.value[0], whole.dout[0], whole.dlse[0])
    call.cu_seqlens_q = call.cu_seqlens_k = bounds(lengths)
    call.longest = (max(lengths),) * 2
    return call


def own_bias(draw: Draw, call: Call) -> None:
    call.causal = True
    shape = (HEADS, 1, call.key.shape[-3])
    call.bias = draw.randn(*(shape if call.cu_seqlens_q is not None else (2, *shape)))


def own_intervals(draw: Draw, call: Call) -> None:
    """Intervals as of forgetting, where all heads have gates."""
    own_bias(draw, call)
    *batch, keys, _, _ = call.key.shape
    call.mask = random_intervals(draw, (*batch, HEADS, keys), call.query.shape[-3])
    call.sink = draw.randn(HEADS)


def own_selection(draw: Draw, call: Call) -> None:
    own_bias(draw, call)
    call.window, call.keep_last = draw.size(20, 60), draw.size(1, 40)


def selection_from_own_keys(draw: Draw, call: Call) -> None:
    """Each query head has its own intervals but not its own bias; the core makes the intervals."""
    call.causal, call.window = True, draw.size(20, 60)
    *batch, keys, _, _ = call.key.shape
    call.mask = draw.kept(*batch, HEADS, 1, keys, density=0.8)
    call.bias = draw.randn(*batch, KV_HEADS, 1, keys)
    call.wanted = ("query", "key", "value")


def own_key_mask(draw: Draw, call: Call) -> None:
    """The heads share a bias without a gradient."""
    *batch, keys, _, _ = call.key.shape
    call.mask = draw.kept(*batch, HEADS, 1, keys, density=0.3)
    call.bias = draw.randn(*(batch or [1]), 1, 1, keys)[0 if not batch else slice(None)]
    call.wanted = ("query", "value")


FORMS: list[Form] = [
    own_bias,
    own_intervals,
    own_selection,
    selection_from_own_keys,
    own_key_mask,
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("make", [dense, packed], ids=lambda make: make.__name__)
@pytest.mark.parametrize("head_dim", [64, 36])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_members_of_groups(
    form: Form,
    head_dim: int,
    make: Callable[[Draw, int], Call],
    deterministic: bool,
    pack_target: Target,
    seed: int,
) -> None:
    draw = Draw(seed, torch.bfloat16, head_dim)
    is_divided = pack_target.has_kernels_of_gpu
    call = make(draw, PAIRS * Limits.of(pack_target).sms if is_divided else 1 << 15)
    form(draw, call)
    pack = loader.pack_for(pack_target.device)
    before = _divided(pack.launch_counts)
    assert_right(call, pack_target, deterministic=deterministic)
    if is_divided:
        assert _divided(pack.launch_counts) > before


def _divided(counts: dict[str, int]) -> int:
    return sum(count for name, count in counts.items() if name.endswith("+ members"))
