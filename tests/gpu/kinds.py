# SPDX-License-Identifier: BSD-3-Clause
"""Calls of every kind: masks, forms of the bias, dense, packed and paged.

Sizes are odd and drawn from each seed. Some keys are dropped for all queries and hold NaN.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import torch
from torch import Tensor

from drawn.buffers import poisoned_buffers
from drawn.calls import Call
from drawn.judge import expected
from flash_dmattn import IntervalMask
from support import Target, cotangent

HEAD_DIMS = (16, 40, 64, 72, 128)


class Draw:
    """Random numbers: one seed sets the shapes, another the values."""

    def __init__(self, seed: int, dtype: torch.dtype, head_dim: int = 0, values: int = 0) -> None:
        self.shapes = random.Random(seed)
        self.dtype = dtype
        self.head_dim = head_dim or self.shapes.choice(HEAD_DIMS)
        self.generator = torch.Generator().manual_seed(seed + values)

    def size(self, least: int, most: int) -> int:
        return self.shapes.randint(least, most)

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype)

    def kept(self, *shape: int, density: float = 0.5) -> Tensor:
        return torch.rand(shape, generator=self.generator) < density

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.int32)

    def permuted(self, numbers: list[int]) -> list[int]:
        order = torch.randperm(len(numbers), generator=self.generator)
        return [numbers[place] for place in order.tolist()]


@dataclasses.dataclass
class Sizes:
    batch: int
    queries: int
    keys: int
    kv_heads: int
    group: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


def dense(
    draw: Draw,
    *,
    batch: tuple[int, int] = (1, 3),
    queries: tuple[int, int] = (1, 400),
    keys: tuple[int, int] = (1, 400),
    kv_heads: tuple[int, int] = (1, 3),
    group: tuple[int, int] = (1, 3),
) -> tuple[Call, Sizes]:
    sizes = Sizes(*(draw.size(*limits) for limits in (batch, queries, keys, kv_heads, group)))
    rows = (sizes.batch, sizes.queries, sizes.heads, draw.head_dim)
    columns = (sizes.batch, sizes.keys, sizes.kv_heads, draw.head_dim)
    dout = cotangent(draw.randn(*rows))
    dlse = draw.randn(sizes.batch, sizes.heads, sizes.queries, dtype=torch.float32)
    return Call(draw.randn(*rows), draw.randn(*columns), draw.randn(*columns), dout, dlse), sizes


def no_mask(draw: Draw) -> Call:
    call, _ = dense(draw)
    call.softcap = 3.0
    return call


def causal(draw: Draw) -> Call:
    call, sizes = dense(draw)
    call.causal = True
    call.bias = draw.randn(1, sizes.heads, 1, 1)
    return call


def key_mask(draw: Draw) -> Call:
    call, sizes = dense(draw)
    call.mask = draw.kept(sizes.batch, 1, 1, sizes.keys)
    call.bias = draw.randn(1, sizes.kv_heads, 1, sizes.keys)
    return with_dropped_keys(draw, call)


def causal_key_mask(draw: Draw) -> Call:
    call, sizes = dense(draw)
    call.mask, call.causal = draw.kept(1, sizes.kv_heads, 1, sizes.keys), True
    call.bias = draw.randn(sizes.batch, sizes.heads, 1, sizes.keys, dtype=torch.float32)
    return with_dropped_keys(draw, call)


def intervals(draw: Draw) -> Call:
    call, sizes = dense(draw)
    call.mask = random_intervals(draw, (sizes.batch, sizes.heads, sizes.keys), sizes.queries)
    call.bias = draw.randn(sizes.batch, 1, 1, sizes.keys)
    return with_dropped_keys(draw, call)


def causal_intervals(draw: Draw) -> Call:
    call, sizes = dense(draw)
    call.causal, call.softcap = True, 5.0
    call.mask = random_intervals(draw, (1, sizes.kv_heads, sizes.keys), sizes.queries)
    call.bias = draw.randn(sizes.batch, sizes.kv_heads, 1, sizes.keys, dtype=torch.float32)
    return with_dropped_keys(draw, call)


def near_keys(draw: Draw) -> Call:
    """Each key is kept by few rows; neighbouring keys have neighbouring rows."""
    length = (draw.size(200, 400),) * 2
    call, sizes = dense(draw, queries=length, keys=length, kv_heads=(1, 2))
    call.mask = IntervalMask.sliding_window(
        draw.size(3, 30), draw.size(0, 20), sizes.queries, sizes.keys
    )
    call.bias = draw.randn(sizes.batch, sizes.kv_heads, 1, sizes.keys)
    return call


def row_mask(draw: Draw) -> Call:
    call, sizes = dense(draw)
    call.mask = draw.kept(1, sizes.heads, sizes.queries, sizes.keys, density=0.3)
    call.mask[:, :, sizes.queries // 3 : sizes.queries // 2] = False
    call.bias = draw.randn(sizes.batch, sizes.kv_heads, sizes.queries, sizes.keys)
    return with_dropped_keys(draw, call)


def causal_row_mask(draw: Draw) -> Call:
    call, sizes = dense(draw)
    call.causal = True
    call.mask = draw.kept(sizes.batch, 1, sizes.queries, sizes.keys)
    call.mask = call.mask.expand(-1, sizes.heads, -1, -1)
    call.bias = draw.randn(1, 1, sizes.queries, sizes.keys, dtype=torch.float32)
    return with_dropped_keys(draw, call)


def window(draw: Draw) -> Call:
    call, sizes = dense(draw)
    call.causal, call.window = True, draw.size(1, 90)
    call.bias = draw.randn(sizes.batch, sizes.kv_heads, 1, sizes.keys)
    return with_dropped_keys(draw, call)


def top_keys(draw: Draw) -> Call:
    call, sizes = dense(draw)
    call.window = draw.size(1, 90)
    call.mask = draw.kept(sizes.batch, 1, 1, sizes.keys, density=0.7)
    call.bias = draw.randn(1, sizes.heads, 1, sizes.keys, dtype=torch.float32)
    return with_dropped_keys(draw, call)


def window_of_rows(draw: Draw) -> Call:
    call, sizes = dense(draw)
    call.causal, call.window = draw.size(0, 1) == 1, draw.size(1, 90)
    call.bias = draw.randn(1, sizes.kv_heads, sizes.queries, sizes.keys)
    return call


def last_and_best(draw: Draw) -> Call:
    """The keys near each query, some of the first, and the best of the others."""
    call, sizes = dense(draw)
    call.causal, call.window = True, draw.size(1, 60)
    call.keep_last, call.keep_first = draw.size(1, 60), draw.size(0, 5)
    call.bias = draw.randn(sizes.batch, sizes.heads, 1, sizes.keys, dtype=torch.float32)
    return with_dropped_keys(draw, call)


def last_and_best_padded(draw: Draw) -> Call:
    """keep_last does not count keys that the mask drops."""
    call, sizes = dense(draw)
    call.causal, call.window = True, draw.size(1, 60)
    call.keep_last, call.keep_first = draw.size(1, 40), draw.size(1, 5)
    call.mask = draw.kept(sizes.batch, 1, 1, sizes.keys, density=0.6)
    call.bias = draw.randn(sizes.batch, sizes.kv_heads, 1, sizes.keys)
    return with_dropped_keys(draw, call)


def last_and_best_of_rows(draw: Draw) -> Call:
    call, sizes = dense(draw)
    call.causal, call.window = True, draw.size(1, 60)
    call.keep_last, call.keep_first = draw.size(1, 60), draw.size(0, 5)
    call.bias = draw.randn(1, sizes.kv_heads, sizes.queries, sizes.keys)
    return call


def last_of_many(draw: Draw) -> Call:
    """More keys than one thread block selects from; the last rows see all but a few."""
    call, sizes = dense(
        draw, batch=(1, 2), queries=(1, 150), keys=(4200, 5000), kv_heads=(1, 2), group=(1, 2)
    )
    call.causal, call.window = True, draw.size(1, 300)
    call.keep_last, call.keep_first = draw.size(100, 600), draw.size(0, 40)
    if draw.size(0, 1):
        call.mask = draw.kept(sizes.batch, 1, 1, sizes.keys, density=0.8)
    call.bias = draw.randn(sizes.batch, sizes.kv_heads, 1, sizes.keys)
    return with_dropped_keys(draw, call)


def last_alone(draw: Draw) -> Call:
    """A sliding window and the first keys, without a bias."""
    call, _ = dense(draw)
    call.causal, call.window = True, 0
    call.keep_last, call.keep_first = draw.size(1, 90), draw.size(0, 5)
    return call


def decode(draw: Draw) -> Call:
    """Few rows: the keys are divided over thread blocks, whose parts are merged."""
    call, sizes = dense(draw, queries=(1, 3), keys=(2000, 4000), kv_heads=(1, 2), group=(1, 8))
    call.causal = True
    call.mask = draw.kept(sizes.batch, sizes.kv_heads, 1, sizes.keys, density=0.7)
    call.bias = draw.randn(sizes.batch, 1, 1, sizes.keys)
    return with_dropped_keys(draw, call)


def few_heads(draw: Draw) -> Call:
    """A long sequence: the backward pass divides the rows of a key block."""
    call, sizes = dense(
        draw, batch=(1, 1), queries=(1100, 1500), keys=(1100, 1500), kv_heads=(1, 1), group=(2, 2)
    )
    call.causal, call.window = True, 130
    call.bias = draw.randn(1, 1, 1, sizes.keys, dtype=torch.float32)
    return with_dropped_keys(draw, call)


def long_keys(draw: Draw) -> Call:
    """Many key blocks for each row tile, so that buffers of a few blocks are reused."""
    call, sizes = dense(draw, queries=(1, 200), keys=(1000, 1600), kv_heads=(1, 2), group=(1, 2))
    call.causal = True
    call.bias = draw.randn(1, sizes.heads, 1, sizes.keys)
    return call


def many_tiles(draw: Draw) -> Call:
    """More tiles than SMs: persistent blocks get several tiles."""
    call, sizes = dense(
        draw, batch=(10, 12), queries=(260, 300), keys=(100, 300), kv_heads=(2, 2), group=(3, 3)
    )
    call.mask = draw.kept(sizes.batch, sizes.kv_heads, 1, sizes.keys, density=0.6)
    call.causal = True
    return with_dropped_keys(draw, call)


def strided(draw: Draw) -> Call:
    """Views as models make them: heads before rows, and slices at odd offsets."""
    call, sizes = dense(draw)
    call.query = call.query.transpose(1, 2).contiguous().transpose(1, 2)
    keys_and_values = draw.randn(sizes.batch, sizes.keys, 2 * sizes.kv_heads, draw.head_dim + 1)
    call.key, call.value = keys_and_values[..., 1:].chunk(2, 2)
    call.dout = call.dout.transpose(1, 3).contiguous().transpose(1, 3)
    call.mask = draw.kept(1, 1, sizes.queries, 2 * sizes.keys + 1)[..., 1::2]
    call.bias = draw.randn(1, sizes.heads, 1, sizes.keys + 3)[..., 3:]
    return call


@dataclasses.dataclass
class Packed:
    """The sizes of packed sequences in random order."""

    q_lengths: list[int]
    k_lengths: list[int]
    kv_heads: int
    heads: int

    @property
    def total_q(self) -> int:
        return sum(self.q_lengths)

    @property
    def total_k(self) -> int:
        return sum(self.k_lengths)


def packed(draw: Draw) -> tuple[Call, Packed]:
    count, kv_heads = draw.size(3, 6), draw.size(1, 2)
    lengths = (draw.permuted([0, *(draw.size(1, 200) for _ in range(count))]) for _ in range(2))
    sizes = Packed(*lengths, kv_heads, kv_heads * draw.size(1, 3))
    rows = (sizes.total_q, sizes.heads, draw.head_dim)
    columns = (sizes.total_k, kv_heads, draw.head_dim)
    call = Call(
        draw.randn(*rows),
        draw.randn(*columns),
        draw.randn(*columns),
        cotangent(draw.randn(*rows)),
        draw.randn(sizes.heads, sizes.total_q, dtype=torch.float32),
        cu_seqlens_q=bounds(sizes.q_lengths),
        cu_seqlens_k=bounds(sizes.k_lengths),
        longest=(max(sizes.q_lengths), max(sizes.k_lengths)),
    )
    return call, sizes


def packed_causal(draw: Draw) -> Call:
    call, sizes = packed(draw)
    call.causal = True
    call.bias = draw.randn(sizes.kv_heads, 1, sizes.total_k)
    return call


def packed_key_mask(draw: Draw) -> Call:
    call, sizes = packed(draw)
    call.mask = draw.kept(1, 1, sizes.total_k)
    call.bias = draw.randn(sizes.heads, 1, sizes.total_k, dtype=torch.float32)
    return with_dropped_keys(draw, call)


def packed_intervals(draw: Draw) -> Call:
    call, sizes = packed(draw)
    call.mask = random_intervals(draw, (sizes.kv_heads, sizes.total_k), call.longest[0])
    call.bias = draw.randn(1, 1, sizes.total_k)
    return with_dropped_keys(draw, call)


def packed_row_mask(draw: Draw) -> Call:
    call, sizes = packed(draw)
    call.causal = True
    call.mask = draw.kept(sizes.kv_heads, sizes.total_q, call.longest[1])
    call.bias = draw.randn(1, sizes.total_q, call.longest[1])
    return call


def packed_window(draw: Draw) -> Call:
    call, sizes = packed(draw)
    call.causal, call.window = True, draw.size(1, 60)
    call.bias = draw.randn(sizes.kv_heads, 1, sizes.total_k)
    return with_dropped_keys(draw, call)


def packed_last_and_best(draw: Draw) -> Call:
    call, sizes = packed(draw)
    call.causal, call.window = True, draw.size(1, 40)
    call.keep_last, call.keep_first = draw.size(1, 40), draw.size(0, 5)
    if draw.size(0, 1):
        call.mask = draw.kept(1, 1, sizes.total_k, density=0.7)
    call.bias = draw.randn(sizes.heads, 1, sizes.total_k)
    return with_dropped_keys(draw, call)


def paged(draw: Draw) -> Call:
    """Pages in random order; unused rows hold NaN."""
    call, sizes = packed(draw)
    page = draw.shapes.choice([1, 8, 16, 48])
    call.causal = True
    call.bias = draw.randn(sizes.kv_heads, 1, sizes.total_k)
    needed = [-(-length // page) for length in sizes.k_lengths]
    numbers = draw.permuted(list(range(sum(needed) + 3)))
    call.block_table = torch.zeros(len(needed), max(needed) + 1, dtype=torch.int32)
    pages = torch.full((2, len(numbers), page, sizes.kv_heads, draw.head_dim), torch.nan)
    pages = pages.to(draw.dtype)
    begin = 0
    for sequence, length in enumerate(sizes.k_lengths):
        for first in range(0, length, page):
            number = numbers.pop()
            call.block_table[sequence, first // page] = number
            keys = slice(begin + first, begin + min(first + page, length))
            for side, tensor in enumerate((call.key, call.value)):
                pages[side, number, : keys.stop - keys.start] = tensor[keys]
        begin += length
    call.key, call.value = pages
    return call


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def random_intervals(draw: Draw, shape: tuple[int, ...], queries: int) -> IntervalMask:
    """Intervals may be empty or inverted, start before the first row or end past the last."""
    start, end = (draw.integers(-2, queries + 3, *shape) for _ in range(2))
    ordered = draw.kept(*shape, density=0.9)
    return IntervalMask(
        torch.where(ordered, torch.minimum(start, end), start),
        torch.where(ordered, torch.maximum(start, end), end),
    )


def with_dropped_keys(draw: Draw, call: Call) -> Call:
    """Drop some keys for all queries; set them, and a bias per key, to NaN."""
    dimension = 0 if call.cu_seqlens_q is not None else 1
    dropped = draw.kept(call.key.shape[dimension], density=0.2)
    if call.window is not None:
        pass  # NaN biases are never selected
    elif isinstance(call.mask, IntervalMask):
        call.mask.end[..., dropped] = call.mask.start[..., dropped]
    else:
        call.mask = call.mask & ~dropped
    for tensor in (call.key, call.value):
        tensor[(slice(None),) * dimension + (dropped,)] = torch.nan
    if call.bias is not None and call.bias.shape[-2] == 1:
        call.bias[..., dropped] = torch.nan
    return call


def assert_right(call: Call, target: Target, *, deterministic: bool) -> None:
    """Compare all results with float64, and check that every element is written."""
    call = call.to(target.device)
    with poisoned_buffers() as buffers:
        got = call.results(deterministic=deterministic)
    assert buffers.guards_are_whole(), "bytes beside a buffer have been written"
    expected(call).check(got)


KINDS: dict[str, Callable[[Draw], Call]] = {
    make.__name__: make
    for make in (
        no_mask,
        causal,
        key_mask,
        causal_key_mask,
        intervals,
        causal_intervals,
        near_keys,
        row_mask,
        causal_row_mask,
        window,
        top_keys,
        window_of_rows,
        last_and_best,
        last_and_best_padded,
        last_and_best_of_rows,
        last_of_many,
        last_alone,
        decode,
        few_heads,
        long_keys,
        many_tiles,
        strided,
        packed_causal,
        packed_key_mask,
        packed_intervals,
        packed_row_mask,
        packed_window,
        packed_last_and_best,
        paged,
    )
}
