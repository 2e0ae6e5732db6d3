# SPDX-License-Identifier: BSD-3-Clause
"""Masks that keep runs of keys; GPU kernels make plans without lists for them.

The declaration of a mask as runs changes no result, whatever it keeps.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from flash_dmattn import IntervalMask, explain, flash_dmattn_varlen_func, forgetting_bias
from flash_dmattn.forgetting_formula import decay_mask
from support import Problem, Target, check, randn, reads_float64
from test_plan_room import results

KINDS = ("run", "any", "padded", "one is kept for ever", "few", "none")


def intervals(kind: str, heads: int, queries: int, keys: int) -> IntervalMask:
    """Return a mask that declares runs, for causal calls."""
    generator = torch.Generator().manual_seed(keys)

    def integers(least: int, past: int) -> Tensor:
        return torch.randint(least, past, (1, heads, keys), generator=generator)

    row = torch.arange(keys) - (keys - queries)
    start = row.expand(1, heads, keys)
    end = start + 1 + integers(0, 40).cumsum(-1) % 150
    end = end.cummax(-1).values
    if kind == "any":
        start = integers(-3, queries)
        end = start + integers(-20, queries)
    elif kind == "padded":
        end = end.masked_fill((row % 100 < 30) | (torch.arange(keys) < 90), 0)
    elif kind == "one is kept for ever":
        end[..., keys // 3 : keys // 3 + 1] = queries + 7
    elif kind == "few":
        end = end.masked_fill(torch.arange(keys) % 129 > 0, 0)
    elif kind == "none":
        end = torch.zeros_like(end)
    mask = IntervalMask(start.int(), end.int())
    mask._keeps_runs = True
    return mask


def without_word(mask: IntervalMask) -> IntervalMask:
    """Return the same mask without the declaration of runs."""
    return IntervalMask(mask.start, mask.end, query_length=mask.query_length)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (150, 500), (330, 140)])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_accuracy(heads: int, queries: int, keys: int, kind: str, pack_target: Target) -> None:
    dtype = pack_target.dtypes[-1]
    query = randn(1, queries, 4, 40, dtype=dtype)
    key, value = (randn(1, keys, 2, 40, dtype=dtype, seed=s) for s in (1, 2))
    bias = randn(1, 2, 1, keys, seed=3)
    mask = intervals(kind, heads, queries, keys)
    check(Problem(query, key, value, mask, bias, causal=True), pack_target)
    check(Problem(query, key, value, mask, None, causal=True), pack_target, deterministic=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("queries", "keys"), [(140, 4500), (2200, 2200)])
def test_what_no_query_keeps_reaches_nothing(
    kind: str, queries: int, keys: int, pack_target: Target
) -> None:
    """The keys form several sections."""
    mask = intervals(kind, 2, queries, keys)
    got = results(mask, pack_target, queries, keys, True)
    want = results(without_word(mask), pack_target, queries, keys, True)
    for one, other in zip(got, want, strict=True):
        assert not one.isnan().any()
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_causality_is_needed(pack_target: Target) -> None:
    mask = intervals("run", 2, 200, 200)
    got = results(mask, pack_target, 200, 200, False)
    for one, other in zip(
        got, results(without_word(mask), pack_target, 200, 200, False), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences(kind: str, pack_target: Target) -> None:
    dtype, device = pack_target.dtypes[0], pack_target.device
    lengths = [0, 1, 130, 0, 2100, 64, 5, 200]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    total = sum(lengths)
    parts = [intervals(kind, 1, n, n) for n in lengths]
    mask = IntervalMask(
        *(torch.cat([getattr(m, side)[0] for m in parts], -1) for side in ("start", "end"))
    )
    found = []
    for says in (True, False):
        mask._keeps_runs = says
        leaves = [
            randn(total, heads, 16, dtype=dtype, seed=heads).to(device).requires_grad_()
            for heads in (2, 1, 1)
        ]
        bias = randn(1, 1, total, seed=7).to(device).requires_grad_()
        out = flash_dmattn_varlen_func(
            *leaves,
            bounds,
            bounds,
            max(lengths),
            max(lengths),
            attn_mask=mask.to(device),
            attn_bias=bias,
            is_causal=True,
            backend=pack_target.backend,
        )
        assert isinstance(out, Tensor)
        dout = randn(*out.shape, dtype=dtype, seed=9).to(device)
        found.append([out.detach(), *torch.autograd.grad(out, (*leaves, bias), dout)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("gates", [1, 2, 4])
def test_forgetting(gates: int, pack_target: Target) -> None:
    """Gates of -inf forget all; gates of 0 forget nothing."""
    if not reads_float64(pack_target):
        pytest.skip("it reads no bias of float64")
    length, dtype = 700, pack_target.dtypes[-1]
    log_forget = -0.4 * torch.rand(1, gates, length, generator=torch.Generator().manual_seed(1))
    log_forget[..., 300:420] = 0
    log_forget[..., 500] = -torch.inf
    bias, mask = forgetting_bias(log_forget, -6.0)
    assert mask is not None
    query = randn(1, length, 4, 64, dtype=dtype)
    key, value = (randn(1, length, 2, 64, dtype=dtype, seed=s) for s in (1, 2))
    check(Problem(query, key, value, mask, bias, causal=True), pack_target)


def test_which_masks_say_so() -> None:
    gates = -torch.rand(1, 2, 40)
    _, mask = forgetting_bias(gates, -2.0)
    assert mask is not None
    sums = gates.double().cumsum(-1)
    mapped = pytree.tree_map(torch.clone, mask)
    for says in (mask, mask.to("cpu"), copy.deepcopy(mask), mapped, decay_mask(sums, sums, -2.0)):
        assert says._keeps_runs
    other = IntervalMask.sliding_window(3, 0, 40, 40)
    for silent in (other, mask & other, IntervalMask(mask.start, mask.end)):
        assert not silent._keeps_runs


def test_plans_of_runs_are_small(pack_target: Target) -> None:
    """They have no lists of the keys of each tile."""
    if not pack_target.has_kernels_of_gpu:
        pytest.skip("only kernels of GPUs make such plans")
    tensors = [torch.empty(1, 4096, 2, 64, dtype=torch.bfloat16, device=pack_target.device)] * 3
    mask = intervals("run", 2, 4096, 4096).to(pack_target.device)
    found = explain(*tensors, mask, is_causal=True, backend=pack_target.backend)
    assert found.plan is not None
    assert found.plan["kernel"] == "runs"
    assert found.plan["plan_bytes"] < 16 * 4096
