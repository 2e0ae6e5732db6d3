# SPDX-License-Identifier: BSD-3-Clause
"""Biases with a row for each query that several sequences or heads share.

Sizes are small, but leave thread blocks without a source, tiles that no row sees, and tiles whose
sources several thread blocks divide. Elements that are not written show as NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from drawn.calls import Call
from support import HALF_TYPES, Target

from .kinds import Draw, assert_right, dense, with_dropped_keys

Form = Callable[[Draw], Call]


def shared_bias(draw: Draw, batch: int, queries: int, keys: int, group: int = 1) -> Call:
    sizes = {"batch": batch, "queries": queries, "keys": keys, "kv_heads": 2, "group": group}
    call, _ = dense(draw, **{name: (size, size) for name, size in sizes.items()})
    call.bias = draw.randn(1, 2, queries, keys)
    return call


def few_keys(draw: Draw) -> Call:
    """Five sequences, four of them in one thread block; all heads share the bias."""
    call = shared_bias(draw, 5, draw.size(200, 255), draw.size(20, 32))
    call.bias = call.bias[:, :1].contiguous()
    return call


def few_tiles(draw: Draw) -> Call:
    """Four tiles for each head of the bias."""
    return shared_bias(draw, 2, draw.size(201, 220), 8 * draw.size(23, 25))


def unseen_tile(draw: Draw) -> Call:
    """The first rows see one of two key tiles."""
    call = few_tiles(draw)
    call.causal = True
    return call


def groups(draw: Draw) -> Call:
    """Heads of a group share a bias, and so do the sequences."""
    call = shared_bias(draw, 3, draw.size(100, 120), 8 * draw.size(33, 36), group=2)
    call.mask = draw.kept(3, 1, 1, call.key.shape[1], density=0.7)
    return with_dropped_keys(draw, call)


def dead_keys(draw: Draw) -> Call:
    """A mask for each query drops keys with NaN, which products with zeros would spread."""
    call = shared_bias(draw, 2, draw.size(100, 120), 8 * draw.size(13, 16), group=2)
    call.mask = draw.kept(1, 1, call.query.shape[1], call.key.shape[1])
    return with_dropped_keys(draw, call)


def windows(draw: Draw) -> Call:
    """Enough short sequences for one per warpgroup; all heads share the bias."""
    call = shared_bias(draw, 514, draw.size(50, 64), draw.size(50, 64))
    call.bias = call.bias[:, :1].contiguous()
    call.mask = draw.kept(514, 1, 1, call.key.shape[1], density=0.7)
    return call


FORMS: list[Form] = [few_keys, few_tiles, unseen_tile, groups, dead_keys]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_shared_biases(form: Form, deterministic: bool, pack_target: Target, seed: int) -> None:
    call = form(Draw(seed, HALF_TYPES[seed % 2], 64))
    assert_right(call, pack_target, deterministic=deterministic)


def test_windows(pack_target: Target, seed: int) -> None:
    call = windows(Draw(seed, torch.float16, 32))
    assert_right(call, pack_target, deterministic=False)
