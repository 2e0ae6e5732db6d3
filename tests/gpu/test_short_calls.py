# SPDX-License-Identifier: BSD-3-Clause
"""Calls of so few keys that several thread blocks share an SM, forward and backward.

Hopper has separate kernels for them. With the fewest keys, blocks take consecutive ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flash_dmattn import (
    IntervalMask,
    dynamic_mask,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
)
from support import Problem, Target, assert_accurate, cotangent, randn

from .test_row_segments import HEADS, KV_HEADS, check_gradients, intervals


@pytest.mark.parametrize(
    ("queries", "keys", "window", "head_dim"),
    [
        (512, 512, 128, 64),
        (200, 333, 100, 128),
        (130, 130, 30, 40),
        (9, 9, 2, 32),
        (1000, 1000, 300, 64),
        (700, 900, 20, 128),
        (64, 1024, 500, 64),
    ],
)
def test_selected_keys(queries: int, keys: int, window: int, head_dim: int, gpu: str) -> None:
    bias = randn(1, KV_HEADS, 1, keys, dtype=torch.bfloat16, seed=4)
    bias = bias.masked_fill(randn(*bias.shape, seed=5) > 1.0, -torch.inf)
    mask = dynamic_mask(bias, window, True, query_length=queries)
    check_gradients(mask, bias, Target(gpu, "cuda"), queries=queries, head_dim=head_dim)


@pytest.mark.parametrize("keys", [500, 600])
def test_many_sequences(keys: int, gpu: str) -> None:
    """All key blocks of some sequences come before those of others: L2 cannot hold all of them."""
    bias = randn(1, KV_HEADS, 1, keys, dtype=torch.bfloat16, seed=4)
    mask = dynamic_mask(bias, 90, True, query_length=100)
    check_gradients(mask, bias, Target(gpu, "cuda"), queries=100, head_dim=64, batch=50)


@pytest.mark.parametrize("max_kept", [0, 1, 200])
def test_rows_and_keys_that_keep_nothing(max_kept: int, gpu: str) -> None:
    start, end = intervals(450, 6, 300)
    rows = torch.arange(450)
    end = torch.where((rows > 60) & (rows < 330), start, end)
    bias = randn(1, KV_HEADS, 1, 450, seed=4)
    mask = IntervalMask(start, end, max_kept=max_kept or None)
    check_gradients(mask, bias, Target(gpu, "cuda"), queries=450, head_dim=64)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "head_dim"), [(333, 333, 64), (100, 777, 128), (500, 70, 32)]
)
def test_without_a_mask(
    queries: int, keys: int, head_dim: int, causal: bool, softcap: float, gpu: str
) -> None:
    dtype = torch.float16
    query = randn(2, queries, HEADS, head_dim, dtype=dtype, seed=1)
    key = randn(2, keys, KV_HEADS, head_dim, dtype=dtype, seed=2)
    value = randn(2, keys, KV_HEADS, head_dim, dtype=dtype, seed=3)
    bias = randn(1, KV_HEADS, 1, keys, dtype=dtype, seed=4)
    problem = Problem(query, key, value, bias=bias, causal=causal, softcap=softcap)
    dout = cotangent(query)
    got = problem.results(Target(gpu, "cuda"), dout=dout)
    assert_accurate(got, problem.truth(dout=dout), problem.eager(dout=dout))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(515, 600), (900, 513), (515, 1024)])
def test_many_tiles_without_a_mask(queries: int, keys: int, causal: bool, gpu: str) -> None:
    """Enough tiles for the short-sequence kernel to take more than 512 keys, up to 1024."""
    query = randn(26, queries, HEADS, 64, dtype=torch.bfloat16, seed=1)
    key = randn(26, keys, KV_HEADS, 64, dtype=torch.bfloat16, seed=2)
    value = randn(26, keys, KV_HEADS, 64, dtype=torch.bfloat16, seed=3)
    problem = Problem(query, key, value, causal=causal)
    dout = torch.zeros_like(query)
    got, want, eager = (
        {name: results[name] for name in ("out", "lse")}
        for results in (
            problem.results(Target(gpu, "cuda"), dout=dout),
            problem.truth(dout=dout),
            problem.eager(dout=dout),
        )
    )
    assert_accurate(got, want, eager)


def test_a_cotangent_that_is_nan_reaches_no_dropped_key(gpu: str) -> None:
    for length in (100, 300):
        query = randn(1, length, HEADS, 64, dtype=torch.bfloat16, seed=1)
        key, value = (
            randn(1, length, KV_HEADS, 64, dtype=torch.bfloat16, seed=seed) for seed in (2, 3)
        )
        bias = randn(1, KV_HEADS, 1, length, dtype=torch.bfloat16, seed=5)
        dropped = torch.arange(length) % 3 == 1
        bias[..., dropped] = torch.nan
        problem = Problem(query, key, value, bias=bias, causal=True)
        dout = torch.full_like(query, torch.nan)
        got = problem.results(Target(gpu, "cuda"), dout=dout, window_size=length // 3)
        for name in ("dkey", "dvalue"):
            assert not got[name][:, dropped].any(), name
        assert not got["dbias"][..., dropped].any()


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_many_tiles_without_columns(head_dim: int, window: int | None, gpu: str) -> None:
    """Most rows of a long query precede all keys, so thread blocks meet many empty tiles."""
    queries, keys, heads = 3000, 150, 2
    query = randn(40, queries, heads, head_dim, dtype=torch.bfloat16, seed=1).to(gpu)
    key, value = (
        randn(40, keys, heads, head_dim, dtype=torch.bfloat16, seed=seed).to(gpu) for seed in (2, 3)
    )
    bias = randn(40, heads, 1, keys, dtype=torch.bfloat16, seed=4).to(gpu)

    def attend(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        settings: Any = {"is_causal": True, "window_size": window, "return_lse": True}
        made: Any = flash_dmattn_func(query, key, value, attn_bias=bias, **settings)
        return made[0], made[1]

    out, lse = attend(query)
    unseen = queries - keys
    assert not out[:, :unseen].any()
    assert lse[..., :unseen].isneginf().all()
    alone, alone_lse = attend(query[:, unseen:])
    torch.testing.assert_close(out[:, unseen:], alone, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse[..., unseen:], alone_lse)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_neighbours_of_a_packed_sequence_are_not_seen(
    head_dim: int, window: int | None, gpu: str
) -> None:
    """Copies beyond the end of a sequence belong to the next one; its NaN must not spread."""
    lengths = [70, 200, 1, 129, 128]
    query, key, value = (
        randn(sum(lengths), 2, head_dim, dtype=torch.bfloat16, seed=seed).to(gpu)
        for seed in (1, 2, 3)
    )
    bias = randn(2, 1, sum(lengths), dtype=torch.bfloat16, seed=4).to(gpu)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(gpu, torch.int32)
    wrong = slice(int(bounds[1]), int(bounds[2]))

    def attend() -> torch.Tensor:
        longest = max(lengths)
        out = flash_dmattn_varlen_func(
            query, key, value, bounds, bounds, longest, longest,
            is_causal=True, attn_bias=bias, window_size=window,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out

    want = attend()
    for tensor in (query, key, value):
        tensor[wrong] = torch.nan
    got = attend()
    assert torch.equal(got[: wrong.start], want[: wrong.start])
    assert torch.equal(got[wrong.stop :], want[wrong.stop :])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("keys", [1, 63, 64, 65, 256, 257, 512, 513, 1000, 1024, 1025])
def test_selection_of_every_number_of_keys(keys: int, dtype: torch.dtype, gpu: str) -> None:
    for window in {0, 1, 7, keys // 4, keys // 2, keys - 1, keys}:
        bias = randn(3, 2, 1, keys, seed=keys + window).mul(3)
        if window % 2:
            bias = bias.round()  # many ties
        bias[0, :, :, ::3] = -torch.inf
        bias[1, :, :, 1::5] = torch.nan
        bias = bias.to(dtype)
        want, got = (
            dynamic_mask(given, window, True, query_length=keys, key_length=keys)
            for given in (bias, bias.to(gpu))
        )
        assert isinstance(want, IntervalMask)
        assert isinstance(got, IntervalMask)
        assert torch.equal(got.start.cpu(), want.start)
        assert torch.equal(got.end.cpu(), want.end)
