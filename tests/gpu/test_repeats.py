# SPDX-License-Identifier: BSD-3-Clause
"""Equal inputs give equal bits in repeated calls, whatever else the device runs."""

from __future__ import annotations

import pytest
import torch

from drawn.calls import Call, assert_same_bits, same_bits
from support import HALF_TYPES, Target

from .kinds import KINDS, Draw, dense, random_intervals, with_dropped_keys


def test_repeats_are_equal(kind: str, pack_target: Target, seed: int) -> None:
    call = KINDS[kind](Draw(seed, HALF_TYPES[seed % 2])).to(pack_target.device)
    first = call.results(deterministic=True)
    for _ in range(100 if pack_target.device == "cuda" else 5):
        again = call.results(deterministic=True)
        if not same_bits(again, first):
            assert_same_bits(again, first)


def many_small(draw: Draw, kind: str) -> Call:
    """Many blocks of few steps, which start and end in varying order."""
    call, sizes = dense(
        draw, batch=(60, 60), queries=(40, 200), keys=(40, 600), kv_heads=(2, 2), group=(2, 2)
    )
    call.bias = draw.randn(1, 2, 1, sizes.keys)
    if kind == "intervals":
        call.mask = random_intervals(draw, (60, 2, sizes.keys), sizes.queries)
    elif kind == "keys":
        call.mask = draw.kept(60, 1, 1, sizes.keys)
    elif kind == "rows":
        call.mask = draw.kept(60, 2, sizes.queries, sizes.keys)
    else:
        call.causal = True
        return call
    return with_dropped_keys(draw, call)


@pytest.mark.parametrize("kind_of_mask", ["causal", "keys", "intervals", "rows"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_no_race(
    kind_of_mask: str, head_dim: int, gpu: str, seed: int, request: pytest.FixtureRequest
) -> None:
    """Kernels on another stream run in between and shift the blocks' start times."""
    call = many_small(Draw(seed, HALF_TYPES[seed % 2], head_dim), kind_of_mask).to(gpu)
    first = call.results(deterministic=True)
    noise, other = torch.randn(700, 700, device=gpu), torch.cuda.Stream()
    for _ in range(250 if request.config.getoption("--exhaustive") else 20):
        with torch.cuda.stream(other):
            for _ in range(5):
                noise = torch.tanh(noise @ noise)
        again = call.results(deterministic=True)
        if not same_bits(again, first):
            assert_same_bits(again, first)


@pytest.mark.parametrize("causal", [False, True])
def test_no_race_in_chains(
    causal: bool, gpu: str, seed: int, request: pytest.FixtureRequest
) -> None:
    """Key blocks of a cluster pass dQ on to each other in reused memory."""
    draw = Draw(seed, torch.bfloat16, 64)
    call, _ = dense(
        draw, batch=(8, 8), queries=(256, 256), keys=(256, 256), kv_heads=(12, 12), group=(1, 1)
    )
    call.causal = causal
    call = call.to(gpu)
    first = call.results(deterministic=True)
    differs = torch.zeros((), dtype=torch.bool, device=gpu)
    for _ in range(5000 if request.config.getoption("--exhaustive") else 50):
        again = call.results(deterministic=True)
        for name, result in first.items():
            differs |= (again[name] != result).any()
    assert not differs
