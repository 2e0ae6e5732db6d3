# SPDX-License-Identifier: BSD-3-Clause
"""Biases for each key in any order and of any size: the largest of a row comes early or late.

Kernels take a row's maximum from its first key block, and scores relative to a bias that the rows
of a tile share. Rows here have several blocks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from drawn.calls import Call
from drawn.judge import expected
from flash_dmattn import IntervalMask
from support import Target, rand_bool, randn

HEADS, KV_HEADS, HEAD_DIM = 2, 1, 64
SIZES = [3e3, 30.0, 1e5, 0.1]


def steps(keys: int) -> Tensor:
    """Return numbers from 0 to 1, with a smaller slope for the second head."""
    return torch.arange(keys) / keys * torch.tensor([1.0, 0.4])[:, None, None]


def one_at(place: float) -> Callable[[int], Tensor]:
    def bias(keys: int) -> Tensor:
        found = torch.zeros(HEADS, 1, keys)
        found[..., int(place * (keys - 1))] = 1.0
        return found

    return bias


ORDERS: dict[str, Callable[[int], Tensor]] = {
    "rising": steps,
    "falling": lambda keys: -steps(keys),
    "falling to 0": lambda keys: 1 - steps(keys),
    "rising to 0": lambda keys: steps(keys) - 1,
    "up and down": lambda keys: 0.5 - (steps(keys) - 0.5).abs(),
    "down and up": lambda keys: (steps(keys) - 0.5).abs(),
    "random": lambda keys: randn(HEADS, 1, keys, seed=3),
    "one at the end": one_at(1),
    "one in the middle": one_at(0.5),
    "one at the start": one_at(0),
    "one far below at the end": lambda keys: -one_at(1)(keys),
}


def call_of(target: Target, keys: int, bias: Tensor, seed: int = 0, **changes: Any) -> Call:
    dtype = target.dtypes[seed % len(target.dtypes)]
    rows, columns = (1, keys, HEADS, HEAD_DIM), (1, keys, KV_HEADS, HEAD_DIM)
    tensors = [
        randn(*shape, seed=seed + n).to(dtype) for n, shape in enumerate((rows, columns, columns))
    ]
    call = Call(*tensors, torch.zeros(rows), torch.zeros(1, HEADS, keys), bias=bias[None])
    return dataclasses.replace(call, wanted=(), causal=True, **changes)


def check(call: Call, target: Target) -> None:
    """Compare out and lse with float64."""
    expected(call).check(call.to(target.device).results(backend=target.backend))


# Calls with kernels of their own, by their keys and dropped keys.
KINDS: dict[str, tuple[int, Callable[[int], dict[str, Any]]]] = {
    "short": (300, lambda keys: {}),
    "causal": (600, lambda keys: {}),
    "all keys": (600, lambda keys: {"causal": False}),
    "few kept": (300, lambda keys: {"mask": rand_bool(1, HEADS, 1, keys)}),
    "many kept": (850, lambda keys: {"mask": rand_bool(1, 1, 1, keys, density=0.8)}),
    "selected": (850, lambda keys: {"window": 700}),
    "few selected": (300, lambda keys: {"window": 64}),
    "window": (850, lambda keys: {"mask": IntervalMask.sliding_window(700, 0, keys, keys)}),
    "softcap": (300, lambda keys: {"softcap": 5.0}),
    "sink": (600, lambda keys: {"sink": torch.tensor([3.0, -50.0])}),
}


COMMON = ["rising", "falling", "one at the end", "one in the middle"]
CASES = [
    (order, kind)
    for order in ORDERS
    for kind in KINDS
    if order in COMMON or kind in ("causal", "many kept")
]


@pytest.mark.parametrize(("order", "kind"), CASES)
def test_any_order(order: str, kind: str, pack_target: Target) -> None:
    """The common orders with each kind of call; other tests vary sizes and dtypes."""
    keys, settings = KINDS[kind]
    number = list(ORDERS).index(order) + list(KINDS).index(kind)
    bias = SIZES[number % len(SIZES)] * ORDERS[order](keys)
    call = call_of(pack_target, keys, bias, seed=number // len(SIZES))
    check(dataclasses.replace(call, **settings(keys)), pack_target)


@pytest.mark.parametrize(("order", "size"), [("rising", 1e5), ("falling", 3e3)])
@pytest.mark.parametrize("dropped", ["first", "last", "here and there", "nearly all"])
def test_dropped_by_their_bias(dropped: str, order: str, size: float, pack_target: Target) -> None:
    keys = 600
    places = {
        "first": slice(0, 200),
        "last": slice(400, keys),
        "here and there": slice(0, keys, 3),
        "nearly all": slice(5, keys),
    }
    bias = size * ORDERS[order](keys)
    bias[..., places[dropped]] = -math.inf
    check(call_of(pack_target, keys, bias), pack_target)


@pytest.mark.parametrize("size", [3e3, 3e38])
@pytest.mark.parametrize("large", [0, 200, 599])
@pytest.mark.parametrize("hidden", ["by a mask of keys", "by intervals", "from the first head"])
def test_what_a_row_does_not_see_reaches_it_not(
    hidden: str, large: int, size: float, pack_target: Target
) -> None:
    """A huge bias at a key that is dropped, or seen by some rows, does not change other rows."""
    keys, from_row = 600, large
    bias = randn(HEADS, 1, keys, seed=3)
    call = call_of(pack_target, keys, bias)
    assert call.bias is not None
    if hidden == "by a mask of keys":
        call.mask = rand_bool(1, 1, 1, keys, density=0.9, seed=1)
        call.mask[..., large] = False
        from_row = keys
    elif hidden == "by intervals":
        start = torch.zeros(1, 1, keys, dtype=torch.int32)
        start[..., large] = from_row = max(large, 450)
        call.mask = IntervalMask(start, torch.full_like(start, keys))
    got = call.to(pack_target.device).results(backend=pack_target.backend)
    call.bias[:, int(hidden == "from the first head") :, :, large] = size
    beside = call.to(pack_target.device).results(backend=pack_target.backend)
    rows = slice(from_row)
    tolerance = 4 * torch.finfo(call.query.dtype).eps
    for name, unseen in (("out", (0, rows)), ("lse", (0, slice(None), rows))):
        one, other = got[name].cpu(), beside[name].cpu()
        torch.testing.assert_close(other[unseen], one[unseen], atol=tolerance, rtol=tolerance)
    if hidden == "from the first head":
        one, other = got["out"].cpu(), beside["out"].cpu()
        torch.testing.assert_close(other[:, :, 0], one[:, :, 0], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("order", "size"), [("rising", 3e3), ("one at the end", 1e5)])
@pytest.mark.parametrize("masked", [False, True])
def test_packed(masked: bool, order: str, size: float, pack_target: Target) -> None:
    keys = 600
    ends = torch.tensor([0, 0, 40, 41, keys], dtype=torch.int32)
    call = call_of(pack_target, keys, size * ORDERS[order](keys))
    assert call.bias is not None
    changes = {
        name: getattr(call, name)[0] for name in ("query", "key", "value", "dout", "dlse", "bias")
    }
    changes["mask"] = rand_bool(1, 1, keys, density=0.9) if masked else None
    packing = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "longest": (559, 559)}
    check(dataclasses.replace(call, **changes, **packing), pack_target)


@pytest.mark.parametrize("queries", [1, 5, 40])
@pytest.mark.parametrize(("order", "size"), [("rising", 3e3), ("falling", 1e5)])
def test_few_queries(order: str, size: float, queries: int, pack_target: Target) -> None:
    call = call_of(pack_target, 900, size * ORDERS[order](900))
    rows = {"query": call.query[:, :queries], "dout": call.dout[:, :queries]}
    check(dataclasses.replace(call, **rows, dlse=call.dlse[..., :queries]), pack_target)
