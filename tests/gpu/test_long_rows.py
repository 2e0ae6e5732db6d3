# SPDX-License-Identifier: BSD-3-Clause
"""Few rows of many keys, which several thread blocks select together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from drawn.buffers import poisoned_buffers
from drawn.source import Source, strided
from flash_dmattn import dynamic_mask, flash_dmattn_func, loader
from support import Target, randn

KEYS = 20_011  # parts of 8192 keys; the last is not full
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Make = Callable[[int], Tensor]
SAMPLES = 4096  # kSampledKeys


@dataclasses.dataclass
class Selection:
    """The arguments of `dynamic_mask`."""

    bias: Tensor
    window: int
    mask: Tensor | None = None
    causal: bool = False
    keep_last: int = 0
    keep_first: int = 0

    def by_target(self, target: Target) -> Tensor:
        """Select by a target."""
        mask = None if self.mask is None else self.mask.to(target.device)
        found = dynamic_mask(
            self.bias.to(target.device),
            self.window,
            self.causal,
            mask,
            keep_last=self.keep_last,
            keep_first=self.keep_first,
            query_length=self.bias.shape[2],
            key_length=self.bias.shape[3],
        )
        assert isinstance(found, Tensor)
        return found.cpu()

    def by_sorting(self) -> Tensor:
        """Select by one stable sort of all rows."""
        queries, keys = self.bias.shape[2:]
        seen = torch.ones(1, 1, queries, keys, dtype=torch.bool)
        if self.causal:
            seen = seen.tril(keys - queries)
        if self.mask is not None:
            seen = seen & self.mask
        seen = seen.expand(torch.broadcast_shapes(seen.shape, self.bias.shape))
        number, count = seen.cumsum(-1), seen.sum(-1, keepdim=True)
        placed = (number <= self.keep_first) | (number > count - self.keep_last)
        values = self.bias.double().expand(seen.shape)
        candidates = seen & ~values.isnan() & (values != -torch.inf)
        ranked = values.masked_fill(~candidates | placed, -torch.inf) + 0.0  # turns -0 into 0
        order = ranked.argsort(dim=-1, descending=True, stable=True)[..., : self.window]
        best = torch.zeros_like(seen).scatter(-1, order, True)
        return candidates & (placed | best)


def check(target: Target, selection: Selection) -> None:
    """Compare a selection with a sort; on a GPU, several thread blocks share a row."""
    pack = loader.pack_for(target.device)
    before = _shared(pack.launch_counts)
    with poisoned_buffers():
        got = selection.by_target(target)
    assert torch.equal(got, selection.by_sorting())
    if target.device == "cuda":
        assert _shared(pack.launch_counts) > before


def _shared(counts: dict[str, int]) -> int:
    return sum(count for name, count in counts.items() if "write_kept_keys" in name)


def ties(seed: int) -> Tensor:
    return randn(1, 2, 1, KEYS, seed=seed).round()


def equal(seed: int) -> Tensor:
    return torch.full((1, 2, 1, KEYS), float(seed))


def rising(seed: int) -> Tensor:
    return randn(1, 2, 1, KEYS, seed=seed).sort(-1).values


def neighbours(seed: int) -> Tensor:
    """The largest values are adjacent, so a few warps list more keys than they have room for."""
    bias = randn(1, 2, 1, KEYS, seed=seed)
    bias[..., 9000:9700] += 10
    return bias


def few_candidates(seed: int) -> Tensor:
    bias = randn(1, 2, 1, KEYS, seed=seed)
    kept = randn(1, 2, 1, KEYS, seed=seed + 1) > 2.3
    return bias.where(kept, torch.nan if seed % 2 else -torch.inf)


def random(seed: int) -> Tensor:
    return randn(1, 2, 1, KEYS, seed=seed)


def special(seed: int) -> Tensor:
    bias = randn(1, 2, 1, KEYS, seed=seed)
    for n, value in enumerate((torch.nan, torch.inf, -torch.inf, -0.0, 0.0)):
        bias[randn(1, 2, 1, KEYS, seed=seed + 1 + n) > 1.5] = value
    return bias


MAKES: list[Make] = [random, ties, equal, rising, neighbours, few_candidates, special]


@pytest.mark.parametrize("window", [1, 300, 9000, KEYS - 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_row_for_all_queries(
    make: Make, dtype: torch.dtype, window: int, pack_target: Target
) -> None:
    check(pack_target, Selection(make(window).to(dtype), window))


COUNTS = [(0, 90, 0), (200, 1, 3), (300, 9000, 0), (5000, 9, 7000)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("window", "last", "first"), COUNTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_last_and_first_keys(
    dtype: torch.dtype, window: int, last: int, first: int, masked: bool, pack_target: Target
) -> None:
    mask = randn(1, 2, 1, KEYS, seed=1) > -0.5 if masked else None
    bias = special(window).to(dtype)
    check(pack_target, Selection(bias, window, mask, keep_last=last, keep_first=first))


@pytest.mark.parametrize("keep_last", [0, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_queries(dtype: torch.dtype, keep_last: int, pack_target: Target) -> None:
    """The first row sees few keys; the tensors are strided."""
    queries, source = 3, Source(5)
    bias = strided(source, randn(1, 2, queries, KEYS, seed=2).to(dtype))
    mask = randn(1, 1, queries, KEYS, seed=3) > -0.5
    mask[..., 0, 40:] = False
    selection = Selection(bias, 400, strided(source, mask), causal=True, keep_last=keep_last)
    check(pack_target, selection)


@pytest.mark.parametrize("window", [1000, 4500])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sample_that_tells_the_wrong_threshold(
    dtype: torch.dtype, window: int, pack_target: Target
) -> None:
    """Only sampled keys are large: fewer keys than the window reach the threshold."""
    bias = randn(1, 1, 1, KEYS, seed=7).clamp(-2, 2)
    sampled = list(dict.fromkeys(map(_sampled_key, range(SAMPLES))))
    bias[..., sampled] = 4 + torch.arange(len(sampled)) / 1024
    check(pack_target, Selection(bias.to(dtype), window))


@pytest.mark.parametrize("window", [KEYS, (1 << 63) - 1])
def test_window_of_all_keys(window: int, pack_target: Target) -> None:
    bias = special(1).to(pack_target.dtypes[0])
    check(pack_target, Selection(bias, window, keep_last=9))


def _sampled_key(sample: int) -> int:
    """As in keep_parts.cu."""
    word = (1 << 32) - 1
    chance = (sample + 1) * 0x9E3779B1 & word
    chance = (chance ^ chance >> 15) * 0x85EBCA6B & word
    chance ^= chance >> 13
    return (sample * KEYS + (chance * KEYS >> 32)) // SAMPLES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_rows(dtype: torch.dtype, pack_target: Target) -> None:
    """Sequences begin anywhere; some have fewer keys than a part, or none."""
    lengths = [257, 0, 17_003, 8193]
    bias = special(3).to(dtype)[0].repeat(1, 1, 2)[..., : sum(lengths)]
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(pack_target.device, torch.int32)
    with poisoned_buffers():
        got = dynamic_mask(
            bias.to(pack_target.device),
            200,
            cu_seqlens_q=bounds,
            cu_seqlens_k=bounds,
            max_seqlen_q=max(lengths),
            max_seqlen_k=max(lengths),
        )
    assert isinstance(got, Tensor)
    for own, row in zip(got.cpu().split(lengths, -1), bias.split(lengths, -1), strict=True):
        assert torch.equal(own, Selection(row[None], 200).by_sorting()[0])


def test_a_step_of_decoding(pack_target: Target) -> None:
    """One query selects keys and attends to them."""
    dtype, device = pack_target.dtypes[0], pack_target.device
    query = randn(2, 1, 4, 64, seed=1).to(device, dtype)
    key, value = (randn(2, KEYS, 2, 64, seed=seed).to(device, dtype) for seed in (2, 3))
    bias = randn(2, 2, 1, KEYS, seed=4).to(dtype)
    mask = Selection(bias, 500).by_sorting().to(device)
    bias = bias.to(device)
    got = flash_dmattn_func(query, key, value, attn_bias=bias, window_size=500, is_causal=True)
    want = flash_dmattn_func(query, key, value, mask, bias, is_causal=True)
    assert isinstance(got, Tensor)
    assert isinstance(want, Tensor)
    assert torch.equal(got, want)
