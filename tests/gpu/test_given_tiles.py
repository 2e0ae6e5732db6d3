# SPDX-License-Identifier: BSD-3-Clause
"""Tiles that thread blocks take dynamically from a counter in the workspace.

512 tiles of up to 1152 columns are enough for that (cpp/cuda/route/tables.h). The results do not
depend on which block computes a tile, so they are equal bit by bit.
"""

from __future__ import annotations

import pytest
import torch

from flash_dmattn import IntervalMask, dynamic_mask, flash_dmattn_func, make_plan
from flash_dmattn.reference_arguments import attention_reference
from support import randn

LENGTH, HEADS, KV_HEADS, WINDOW = 2048, 32, 8, 1024


@pytest.fixture
def tensors(gpu: str) -> tuple[torch.Tensor, ...]:
    query = randn(1, LENGTH, HEADS, 64, seed=0)
    key, value = (randn(1, LENGTH, KV_HEADS, 64, seed=n) for n in (1, 2))
    bias = randn(1, KV_HEADS, 1, LENGTH, seed=3)
    return tuple(tensor.to(gpu, torch.bfloat16) for tensor in (query, key, value, bias))


@pytest.mark.parametrize("window_size", [None, WINDOW])
def test_each_tile_is_given_out_once(
    window_size: int | None, tensors: tuple[torch.Tensor, ...]
) -> None:
    query, key, value, bias = tensors
    out = flash_dmattn_func(
        query, key, value, attn_bias=bias, is_causal=True, window_size=window_size
    )
    assert isinstance(out, torch.Tensor)
    keep = None
    if window_size:
        mask = dynamic_mask(bias, window_size, True)
        assert isinstance(mask, IntervalMask)
        keep = mask.to_bool(LENGTH)
    for group in range(KV_HEADS):
        heads = slice(HEADS // KV_HEADS * group, HEADS // KV_HEADS * (group + 1))
        own = slice(group, group + 1)
        want, _ = attention_reference(
            query[:, :, heads].float(),
            key[:, :, own].float(),
            value[:, :, own].float(),
            None if keep is None else keep[:, own],
            bias[:, own].float(),
            causal=True,
        )
        torch.testing.assert_close(out[:, :, heads].float(), want, atol=2e-2, rtol=2e-2)


def test_graphs_and_streams_that_share_a_plan(tensors: tuple[torch.Tensor, ...]) -> None:
    """Each launch begins with the first tile, even while another launch runs."""
    query, key, value, bias = tensors
    mask = dynamic_mask(bias, WINDOW, True)
    plan = make_plan(query, key, mask, is_causal=True)

    def call() -> torch.Tensor:
        out = flash_dmattn_func(query, key, value, attn_bias=bias, plan=plan)
        assert isinstance(out, torch.Tensor)
        return out

    want = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = call()
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    got = []
    for _ in range(4):
        for stream in streams:
            with torch.cuda.stream(stream):
                got.append(call())
        replayed.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(replayed, want)
    assert all(torch.equal(out, want) for out in got)
