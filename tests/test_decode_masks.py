# SPDX-License-Identifier: BSD-3-Clause
"""One query with a key mask and no gradients: a decoding step.

GPUs make no plan there. Warps list the kept keys themselves.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_dmattn import flash_dmattn_func
from support import Problem, Target, assert_accurate, moved, rand_bool, randn, simple_problem

# Near multiples of a mask word, a warp's turn, a split's keys, and the keys listed at a time.
KEYS = (1, 3, 5, 127, 130, 257, 1023, 1030, 4096, 4099, 8200, 33_001)


def step(problem: Problem, target: Target) -> dict[str, Tensor]:
    """Return out and lse of the call, which saves nothing for a backward pass."""
    tensors = (problem.query, problem.key, problem.value, problem.mask, problem.bias)
    placed = [None if t is None else moved(t, target.device, None) for t in tensors]
    with torch.no_grad():
        out, lse = flash_dmattn_func(
            *placed, problem.scale, problem.causal, return_lse=True, backend=target.backend
        )
    return {"out": out.cpu(), "lse": lse.cpu()}


def assert_right(problem: Problem, target: Target) -> None:
    dout = torch.zeros_like(problem.query)
    parts = step(problem, target), problem.truth(dout=dout), problem.eager(dout=dout)
    assert_accurate(*({name: part[name] for name in ("out", "lse")} for part in parts))


def one_query(target: Target, keys: int, mask: Tensor, **sizes: int) -> Problem:
    problem = simple_problem(target.dtypes[-1], queries=1, keys=keys, **sizes)
    problem.mask = mask
    problem.bias = randn(1, mask.shape[1], 1, keys, dtype=problem.query.dtype, seed=8)
    return problem


@pytest.mark.parametrize("density", [0.0, 0.04, 1.0])
@pytest.mark.parametrize("keys", KEYS)
def test_any_number_of_keys(keys: int, density: float, kernel_target: Target) -> None:
    mask = rand_bool(1, 2, 1, keys, density=density, seed=keys)
    assert_right(one_query(kernel_target, keys, mask, group=4, head_dim=64), kernel_target)


@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize("head_dim", [20, 64, 128])
def test_who_shares_a_mask(head_dim: int, heads: int, kernel_target: Target) -> None:
    mask = rand_bool(2, heads, 1, 2100, density=0.3, seed=heads)
    problem = one_query(kernel_target, 2100, mask, group=3, head_dim=head_dim)
    problem.causal = True
    assert_right(problem, kernel_target)


def masks_as_they_lie(keys: int) -> dict[str, Tensor]:
    bits = rand_bool(1, 2, 1, 2 * keys + 3, density=0.4, seed=1)
    return {
        "odd beginning": bits[..., 3 : 3 + keys],
        "every second": bits[..., 1 : 1 + 2 * keys : 2],
        "one for all": bits[..., :1].expand(1, 2, 1, keys),
        "any byte": (bits[..., :keys] * 0x40).to(torch.uint8).view(torch.bool),
        "two dimensions": bits[0, 0, :, 5 : 5 + keys],
    }


@pytest.mark.parametrize("name", masks_as_they_lie(1))
@pytest.mark.parametrize("keys", [70, 1501])
def test_masks_as_they_lie(keys: int, name: str, kernel_target: Target) -> None:
    mask = masks_as_they_lie(keys)[name]
    problem = simple_problem(
        kernel_target.dtypes[-1], batch=1, queries=1, keys=keys, group=2, head_dim=64
    )
    problem.mask = mask
    assert_right(problem, kernel_target)


@pytest.mark.parametrize("keys", [300, 5000])
def test_dropped_keys_are_not_read(keys: int, kernel_target: Target) -> None:
    mask = rand_bool(1, 2, 1, keys, density=0.2, seed=2)
    problem = one_query(kernel_target, keys, mask, batch=1, group=4, head_dim=64)
    clean = step(problem, kernel_target)
    dropped = ~mask[0, :, 0].T
    problem.key[0][dropped] = torch.nan
    problem.value[0][dropped] = torch.inf
    assert problem.bias is not None
    problem.bias[0, :, 0].T[dropped] = torch.nan
    got = step(problem, kernel_target)
    for name, value in clean.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("keys", [1000, 20_000])
def test_steps_repeat_bit_for_bit(keys: int, pack_target: Target) -> None:
    mask = rand_bool(1, 2, 1, keys, density=0.1, seed=3)
    problem = one_query(pack_target, keys, mask, batch=1, group=4, head_dim=128)
    first = step(problem, pack_target)
    for _ in range(20):
        for name, value in step(problem, pack_target).items():
            assert torch.equal(value, first[name]), name


def test_a_kept_plan_gives_the_same(pack_target: Target) -> None:
    """With gradients a plan is made, since the backward pass reads it."""
    mask = rand_bool(1, 2, 1, 3000, density=0.3, seed=4)
    problem = one_query(pack_target, 3000, mask, group=4, head_dim=64)
    planned = problem.results(pack_target, dout=torch.zeros_like(problem.query))
    for name, value in step(problem, pack_target).items():
        torch.testing.assert_close(value, planned[name], atol=1e-2, rtol=1e-2)
