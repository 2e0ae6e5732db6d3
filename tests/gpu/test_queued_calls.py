# SPDX-License-Identifier: BSD-3-Clause
"""Calls of many short sequences that queue without waits between them."""

from __future__ import annotations

import pytest
import torch

from drawn.calls import Call, assert_same_bits
from drawn.judge import expected
from support import HALF_TYPES, cotangent

from .kinds import Draw

# Batch, heads, head dimension, tokens. Some have more blocks than run at a time and process heads
# in groups; in others all blocks run at once.
SHAPES = [(8, 12, 64, 256), (45, 4, 64, 256), (60, 4, 40, 256), (32, 12, 64, 130), (64, 8, 32, 256)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_queued_calls(
    shape: tuple[int, int, int, int],
    causal: bool,
    deterministic: bool,
    gpu: str,
    seed: int,
    pytestconfig: pytest.Config,
) -> None:
    batch, heads, head_dim, tokens = shape
    draw = Draw(seed, HALF_TYPES[seed % 2], head_dim)
    query, key, value, dout = (draw.randn(2, tokens, heads, head_dim) for _ in range(4))
    dlse = torch.zeros(2, heads, tokens)
    small = Call(query, key, value, cotangent(dout), dlse, causal=causal).to(gpu)
    want = expected(small)
    want.check(small.results(deterministic=deterministic))
    order = torch.tensor(draw.permuted([0, 1] * (batch // 2) + [0] * (batch % 2)), device=gpu)
    large = small.mapped(lambda tensor: tensor[order])
    times = 100 if pytestconfig.getoption("--exhaustive") else 6
    queued = [large.results(deterministic=deterministic) for _ in range(times)]
    for got in queued:
        for name, result in got.items():
            assert result.isfinite().all(), name
            difference = (result.double() - want.results[name][order]).abs()
            assert (difference <= want.bounds[name][order]).all(), name
        if deterministic:
            assert_same_bits(got, queued[0])
