# SPDX-License-Identifier: BSD-3-Clause
"""Tensors of more than 2^31 elements, and as many scores; single heads against the reference."""

from __future__ import annotations

import dataclasses
import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drawn.calls import Call, assert_same_bits
from drawn.judge import expected
from flash_dmattn import IntervalMask, dynamic_mask
from support import HALF_TYPES

LIMIT = 1 << 31


class Gpu:
    """A GPU, its free memory, and random tensors made on it."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator("cuda").manual_seed(seed)
        self.dtype = HALF_TYPES[seed % 2]
        torch.cuda.empty_cache()
        self.free = torch.cuda.mem_get_info()[0] / 2**30

    def needs(self, gigabytes: int) -> None:
        if self.free < gigabytes:
            pytest.skip(f"needs {gigabytes} GiB of GPU memory, {self.free:.0f} are free")

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(
            shape, dtype=dtype or self.dtype, device="cuda", generator=self.generator
        )

    def kept(self, *shape: int, density: float) -> Tensor:
        kept = torch.empty(shape, dtype=torch.bool, device="cuda")
        return kept.bernoulli_(density, generator=self.generator)

    def call(self, rows: tuple[int, ...], columns: tuple[int, ...]) -> Call:
        lse = (rows[0], rows[2], rows[1]) if len(rows) == 4 else (rows[1], rows[0])
        dout = self.randn(*rows).mul_(rows[-1] ** -0.5)
        dlse = self.randn(*lse, dtype=torch.float32)
        return Call(self.randn(*rows), self.randn(*columns), self.randn(*columns), dout, dlse)


@pytest.fixture
def large(gpu: str, seed: int) -> Iterator[Gpu]:
    """Run one test at a time on the machine, so that the free memory stays free."""
    with Path(tempfile.gettempdir(), "flash_dmattn_large_tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Gpu(seed)
        torch.cuda.empty_cache()


def of_head(name: str, tensor: Tensor | None, batch: int, head: int, heads: int) -> Tensor | None:
    """Return a KV head's part of a tensor."""
    if tensor is None:
        return None
    dimension = 2 if name in ("query", "key", "value", "dout", "out") else 1
    group = tensor.shape[dimension] // heads
    part = tensor.narrow(dimension, head * group, group)
    return part if tensor.shape[0] == 1 else part[batch : batch + 1]


def check_head(call: Call, results: dict[str, Tensor], batch: int, head: int) -> None:
    """Compare one KV head of one batch element with the float64 formula."""
    heads = call.key.shape[2]

    def part(name: str, tensor: Tensor | None) -> Tensor | None:
        return of_head(name.removeprefix("d"), tensor, batch, head, heads)

    names = ("query", "key", "value", "dout", "dlse", "bias")
    mask = call.mask
    if isinstance(mask, IntervalMask):
        mask = IntervalMask(part("start", mask.start), part("end", mask.end))
    elif mask is not None:
        mask = part("mask", mask)
    small = dataclasses.replace(
        call, mask=mask, **{name: part(name, getattr(call, name)) for name in names}
    )
    want = expected(small)
    want.check({name: part(name, result) for name, result in results.items()})


def test_scores(large: Gpu) -> None:
    batch, heads, kv_heads, length = 3, 8, 4, 9513
    assert batch * heads * length**2 > LIMIT
    large.needs(40)
    call = large.call((batch, length, heads, 64), (batch, length, kv_heads, 64))
    call.bias, call.causal = large.randn(batch, kv_heads, 1, length), True
    call.mask = dynamic_mask(call.bias, 300, True)
    results = call.results()
    for batch_index, head in ((0, 0), (batch - 1, kv_heads - 1)):
        check_head(call, results, batch_index, head)


def test_queries(large: Gpu) -> None:
    length, heads, kv_heads = (1 << 20) + 77, 32, 16
    assert length * heads * 64 > LIMIT
    large.needs(70)
    call = large.call((1, length, heads, 64), (1, 150, kv_heads, 64))
    call.mask = large.kept(1, kv_heads, 1, 150, density=0.6)
    call.bias = large.randn(1, kv_heads, 1, 150, dtype=torch.float32)
    results = call.results()
    check_head(call, results, 0, kv_heads - 1)


def test_keys(large: Gpu) -> None:
    length, heads, kv_heads = (1 << 21) + 13, 32, 16
    assert length * kv_heads * 64 > LIMIT
    large.needs(64)
    call = large.call((1, 5, heads, 64), (1, length, kv_heads, 64))
    call.mask = large.kept(1, kv_heads, 1, length, density=0.2)
    call.bias = large.randn(1, kv_heads, 1, length)
    results = call.results()
    check_head(call, results, 0, 0)
    check_head(call, results, 0, kv_heads - 1)


def test_mask_and_bias_of_every_query(large: Gpu) -> None:
    heads, queries, keys = 16, 16401, 8203
    assert heads * queries * keys > LIMIT
    large.needs(60)
    call = large.call((1, queries, heads, 64), (1, keys, heads, 64))
    call.mask = large.kept(1, heads, queries, keys, density=0.2)
    call.bias = large.randn(1, heads, queries, keys)
    results = call.results()
    check_head(call, results, 0, heads - 1)


def test_expanded_mask_and_bias(large: Gpu) -> None:
    """A stride of 0 expands mask and bias to as many elements."""
    heads, queries, keys = 32, 8200, 8203
    assert heads * queries * keys > LIMIT
    large.needs(8)
    call = large.call((1, queries, heads, 64), (1, keys, heads, 64))
    call.mask = large.kept(1, 1, queries, keys, density=0.02)
    want = call.results(deterministic=True)
    call.mask = call.mask.expand(1, heads, queries, keys)
    assert_same_bits(call.results(deterministic=True), want)


def test_packed_queries_and_their_mask(large: Gpu) -> None:
    q_lengths, k_lengths = [70_003, 0, 500_001, 478_649], [150, 90, 1, 149]
    heads, kv_heads, total = 32, 16, sum(q_lengths)
    longest = max(k_lengths)
    assert total * heads * 64 > LIMIT
    assert kv_heads * total * longest > LIMIT
    large.needs(64)
    call = large.call((total, heads, 64), (sum(k_lengths), kv_heads, 64))
    call.mask = large.kept(kv_heads, total, longest, density=0.5)
    call.bias = large.randn(kv_heads, 1, sum(k_lengths))
    call.longest = (max(q_lengths), longest)
    call.cu_seqlens_q, call.cu_seqlens_k = (
        torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
        for lengths in (q_lengths, k_lengths)
    )
    results = call.results()
    # The last sequence alone.
    rows, keys = slice(total - q_lengths[-1], total), slice(-k_lengths[-1], None)
    last = Call(
        call.query[None, rows],
        call.key[None, keys],
        call.value[None, keys],
        call.dout[None, rows],
        call.dlse[None, :, rows],
        call.mask[None, :, rows, : k_lengths[-1]],
        call.bias[None, :, :, keys],
    )
    places = {"out": rows, "dquery": rows, "dkey": keys, "dvalue": keys}
    parts = {name: results[name][place][None] for name, place in places.items()}
    parts["lse"] = results["lse"][None, :, rows]
    parts["dbias"] = results["dbias"][None, :, :, keys]
    check_head(last, parts, 0, kv_heads - 1)


def test_selection_for_every_query(large: Gpu) -> None:
    heads, queries, keys, window = 16, 16401, 8203, 64
    assert heads * queries * keys > LIMIT
    large.needs(16)
    bias = large.randn(1, heads, queries, keys)
    keep = dynamic_mask(bias, window)
    assert keep.shape == bias.shape
    assert (keep.sum(-1, dtype=torch.int32) == window).all()
    for rows in (slice(0, 40), slice(queries - 40, queries)):
        want = dynamic_mask(bias[:, -2:, rows], window, backend="reference")
        assert torch.equal(keep[:, -2:, rows], want)


@pytest.mark.parametrize("name", ["query", "key", "value", "dout", "mask", "bias"])
def test_rows_that_lie_far_apart(name: str, large: Gpu) -> None:
    """A span of 2^32 elements, almost none of which are read."""
    large.needs(20)
    rows, step = 4, (1 << 30) + 64
    call = large.call((1, rows, 2, 64), (1, rows, 2, 64))
    call.mask, call.bias = large.kept(1, 1, rows, 64, density=0.7), large.randn(1, 1, rows, 64)
    call.mask, call.bias = call.mask[..., :rows], call.bias[..., :rows]
    want = call.results(deterministic=True)
    near = getattr(call, name)
    row = 2 if name in ("mask", "bias") else 1
    strides = list(near.stride())
    strides[0], strides[row] = 4 * step, step
    if row == 2:
        strides[1] = 4 * step
    far = torch.empty(4 * step, dtype=near.dtype, device="cuda").as_strided(near.shape, strides)
    far.copy_(near)
    assert_same_bits(dataclasses.replace(call, **{name: far}).results(deterministic=True), want)
