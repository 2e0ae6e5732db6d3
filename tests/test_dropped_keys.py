# SPDX-License-Identifier: BSD-3-Clause
"""A key that no query of a head keeps does not affect any result or gradient of that head.

It may be dropped by a mask, by selection, or by -inf for all queries or for each of them, and its
key, value and bias may hold anything. Another head of its group may keep it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from support import Problem, Target, check, rand_bool, randn, simple_problem

QUERIES, KEYS, HEADS = 40, 50, 4
DROPPED = torch.arange(KEYS) % 3 == 1
FORMS = ["mask", "row_mask", "bias", "row_bias", "row_mask_and_bias"]
# No bias is poisoned: in the forms with a bias, its -inf drops the key.
HOLDERS = {"nan_key": torch.nan, "inf_value": torch.inf, "nan_value": torch.nan}


def drop(problem: Problem, form: str, dropped: Tensor, dtype: torch.dtype) -> None:
    """Drop keys, bool (heads, K), from all queries of each head."""
    heads = dropped.shape[0]
    rows = 1 if form in ("mask", "bias") else QUERIES
    drops = dropped[None, :, None].expand(1, heads, rows, KEYS)
    if form in ("mask", "row_mask"):
        problem.mask = ~drops & (rand_bool(1, 1, rows, KEYS, density=0.7) | (rows == 1))
        problem.bias = randn(1, 1, 1, KEYS, dtype=dtype, seed=5)
        return
    problem.bias = randn(1, heads, rows, KEYS, dtype=dtype, seed=5)
    if form == "row_mask_and_bias":
        # The mask drops the keys in some rows, the bias in the others.
        by_mask = rand_bool(1, 1, QUERIES, KEYS)
        problem.mask = ~by_mask | ~dropped.any(0)
        drops = drops & problem.mask
    problem.bias = problem.bias.masked_fill(drops, -torch.inf)


def poison(problem: Problem, holder: str, at: Tensor) -> None:
    """Poison keys, bool (kv_heads, K)."""
    tensor = problem.key if holder.endswith("key") else problem.value
    tensor[at.T[None].expand(tensor.shape[:3])] = HOLDERS[holder]


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("form", FORMS)
def test_what_all_heads_drop(form: str, holder: str, softcap: float, target: Target) -> None:
    for dtype in target.dtypes:
        problem = simple_problem(dtype, queries=QUERIES, keys=KEYS, softcap=softcap)
        drop(problem, form, DROPPED[None], dtype)
        unchanged_by(problem, holder, DROPPED.expand(2, KEYS), target)


def unchanged_by(problem: Problem, holder: str, at: Tensor, target: Target) -> None:
    """Assert that the keys' content changes no bit of a result, and that their gradients are 0."""
    dout = randn(*problem.query.shape, dtype=problem.query.dtype)
    dlse = randn(problem.query.shape[0], problem.query.shape[2], problem.query.shape[1])
    clean = problem.results(target, dout=dout, dlse=dlse)
    poison(problem, holder, at)
    poisoned = problem.results(target, dout=dout, dlse=dlse)
    for name, value in clean.items():
        assert torch.equal(poisoned[name], value), name
    places = at.T[None].expand(problem.key.shape[:3])
    assert not clean["dkey"][places].any()
    assert not clean["dvalue"][places].any()


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("form", ["mask", "row_mask"])
def test_biases_that_are_not_numbers(form: str, softcap: float, target: Target) -> None:
    for dtype in target.dtypes:
        problem = simple_problem(dtype, queries=QUERIES, keys=KEYS, softcap=softcap)
        drop(problem, form, DROPPED[None], dtype)
        dout = randn(*problem.query.shape, dtype=dtype)
        clean = problem.results(target, dout=dout)
        problem.bias[..., DROPPED] = torch.nan
        poisoned = problem.results(target, dout=dout)
        for name, value in clean.items():
            assert torch.equal(poisoned[name], value), name
        assert not poisoned["dbias"][..., DROPPED].any()


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("queries", [1, QUERIES])
def test_what_one_head_drops_and_another_keeps(
    queries: int, form: str, holder: str, softcap: float, target: Target
) -> None:
    """The gradients of such a key come only from the heads that keep it."""
    if queries == 1 and form not in ("mask", "bias"):
        return
    for dtype in target.dtypes:
        problem = simple_problem(dtype, queries=queries, keys=KEYS, softcap=softcap)
        dropped = torch.stack([DROPPED, DROPPED.roll(1), DROPPED, DROPPED.roll(1)])
        drop(problem, form, dropped, dtype)
        dout = randn(*problem.query.shape, dtype=dtype)
        clean = problem.results(target, dout=dout)
        check(problem, target)
        poison(problem, holder, DROPPED.expand(2, KEYS))
        got = problem.results(target, dout=dout)
        droppers = torch.tensor([0, 2])  # heads that drop the poisoned keys
        for name, head_axis in (("out", 2), ("dquery", 2), ("lse", 1)):
            mine, before = (t[name].index_select(head_axis, droppers) for t in (got, clean))
            assert torch.equal(mine, before), name
        if problem.bias.shape[1] == HEADS:
            assert torch.equal(got["dbias"][:, droppers], clean["dbias"][:, droppers])
            if form != "row_mask_and_bias":
                assert not got["dbias"][:, droppers][..., DROPPED].any()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_empty_rows_hold_reaches_nothing(poison: float, target: Target) -> None:
    for dtype in target.dtypes:
        problem = simple_problem(dtype, queries=QUERIES, keys=KEYS)
        empty = torch.arange(QUERIES) % 5 == 2
        problem.mask = rand_bool(2, 1, QUERIES, KEYS) & ~empty[:, None]
        dout = randn(*problem.query.shape, dtype=dtype)
        clean = problem.results(target, dout=dout)
        problem.query[:, empty] = poison
        dout[:, empty] = poison
        poisoned = problem.results(target, dout=dout)
        for name, value in clean.items():
            assert torch.equal(poisoned[name], value), name


def bytes_of(mask: Tensor) -> Tensor:
    """Return the same booleans with bytes other than 1 for True, as NumPy makes them."""
    other = (torch.arange(mask.numel()) * 37 % 255 + 1).to(torch.uint8).view(mask.shape)
    return (other * mask.to(torch.uint8)).view(torch.bool)


@pytest.mark.parametrize(
    "shape, window", [((1, 1, QUERIES, KEYS), None), ((2, 4, 1, KEYS), None), ((2, 1, 1, KEYS), 7)]
)
@pytest.mark.parametrize("form", [lambda mask: (mask.byte() * 255).view(torch.bool), bytes_of])
def test_booleans_of_any_bytes(
    form: Callable[[Tensor], Tensor], shape: tuple[int, ...], window: int | None, target: Target
) -> None:
    problem = simple_problem(target.dtypes[0], queries=QUERIES, keys=KEYS, causal=True)
    problem.bias = randn(2, 2, 1, KEYS, dtype=target.dtypes[0], seed=5)
    problem.mask = rand_bool(*shape)
    dout = randn(*problem.query.shape, dtype=target.dtypes[0])
    want = problem.results(target, dout=dout, window_size=window)
    problem.mask = form(problem.mask)
    got = problem.results(target, dout=dout, window_size=window)
    for name, value in want.items():
        assert torch.equal(got[name], value), name
