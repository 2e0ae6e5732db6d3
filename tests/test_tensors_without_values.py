# SPDX-License-Identifier: BSD-3-Clause
"""Reads of values where tensors have none: make_fx, FakeTensorMode and the meta device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from flash_dmattn import (
    IntervalMask,
    KeptKeys,
    dynamic_mask,
    flash_dmattn_func,
    forgetting_bias,
)
from flash_dmattn.modules import (
    AttentionCache,
    DynamicMaskAttention,
    ForgettingAttention,
    ForgettingCache,
)

WITHOUT_VALUES = ["fake", "meta"]


@contextlib.contextmanager
def without_values(kind: str) -> Any:
    """Make all tensors fake or meta ones."""
    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        yield


def _forget(gates: Tensor) -> tuple[Tensor, ...]:
    bias, mask = forgetting_bias(gates, -3.0)
    assert mask is not None
    return bias, mask.start, mask.end


def _tree(parents: Tensor) -> tuple[Tensor, ...]:
    mask, order = IntervalMask.tree(parents, prefix_length=2)
    return mask.start, mask.end, order


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (_forget, [-torch.rand(2, 2, 10), -torch.rand(2, 2, 10)]),
        (_tree, [torch.tensor([[-1, 0, 0, 1]]), torch.tensor([[-1, -1, 1, 2]])]),
    ],
)
def test_graphs_of_operations(
    function: Callable[..., Any], arguments: list[Tensor], mode: str
) -> None:
    graph = make_fx(function, tracing_mode=mode)(arguments[0])
    for argument in arguments:
        torch.testing.assert_close(graph(argument), function(argument))


def test_block_masks() -> None:
    flex_attention = pytest.importorskip("torch.nn.attention.flex_attention")

    def block_mask(device: str) -> Any:
        return flex_attention.create_block_mask(
            lambda b, h, i, j: i + 10 >= j, None, None, 20, 30, device=device, BLOCK_SIZE=16
        )

    query, key, mask = torch.randn(2, 20, 4, 8), torch.randn(2, 30, 2, 8), block_mask("cpu")
    graph = make_fx(lambda q, k: flash_dmattn_func(q, k, k, mask))(query, key)
    torch.testing.assert_close(graph(query, key), flash_dmattn_func(query, key, key, mask))
    query, key = query.to("meta"), key.to("meta")
    assert flash_dmattn_func(query, key, key, block_mask("meta")).shape == query.shape


@pytest.mark.parametrize("size", [(1, 4), (4, 4)])
def test_blocks_of_sizes_that_are_symbols(size: tuple[int, int]) -> None:
    blocks = torch.zeros(2, 2, 20 // size[0], 3, dtype=torch.int32)

    def call(query: Tensor, key: Tensor, blocks: Tensor) -> Any:
        return flash_dmattn_func(query, key, key, block_indices=blocks, block_size=size)

    arguments = torch.randn(2, 20, 4, 8), torch.randn(2, 30, 2, 8), blocks
    graph = make_fx(call, tracing_mode="symbolic")(*arguments)
    torch.testing.assert_close(graph(*arguments), call(*arguments))


@pytest.mark.parametrize("kind", WITHOUT_VALUES)
@pytest.mark.parametrize("settings", [{}, {"capacity": 4}, {"rollback": 2}])
def test_forgetting_cache(kind: str, settings: dict[str, Any]) -> None:
    with without_values(kind):
        layer, cache = ForgettingAttention(16, 2), ForgettingCache(**settings)
        for count in (5, 1, 1):
            assert layer(torch.randn(2, count, 16), cache=cache).shape == (2, count, 16)
        cache.reorder(torch.tensor([1, 0, 1]))
        cache.truncate(cache.length - cache.rollback // 2)
        assert layer(torch.randn(3, 1, 16), cache=cache).shape == (3, 1, 16)
    assert repr(cache).startswith("ForgettingCache(length=")


def test_tree() -> None:
    with FakeTensorMode():
        mask, order = IntervalMask.tree(torch.tensor([[-1, 0, 0, 1]]), prefix_length=2)
    assert mask.start.shape == (1, 1, 6)
    assert order.shape == (1, 4)


@pytest.mark.parametrize("kind", WITHOUT_VALUES)
def test_kept_keys(kind: str) -> None:
    with without_values(kind):
        cache, states = AttentionCache(), torch.randn(2, 5, 16)
        layer = DynamicMaskAttention(16, 2, window_size=3)
        seen = torch.ones(2, 5, dtype=torch.bool)
        for _ in range(2):  # the second has a key mask with an unknown number of kept keys
            assert layer(states, seen, cache=cache).shape == states.shape
            seen = torch.ones(2, 10, dtype=torch.bool)
        assert repr(cache).startswith("AttentionCache(length=None,")
        state, key = KeptKeys(3, rollback=1), torch.randn(2, 5, 2, 8)
        state.update(key, key, torch.randn(2, 2, 1, 5))
        assert repr(state).startswith("KeptKeys(window_size=3")
        with pytest.raises(ValueError, match=f"counter of the state must have values.*{kind}"):
            state.forget(1)


@pytest.mark.parametrize("kind", WITHOUT_VALUES)
def test_lengths_that_cannot_be_read(kind: str) -> None:
    with without_values(kind):
        bounds, bias = torch.zeros(3, dtype=torch.int32), torch.randn(1, 1, 10)
        layer, states = DynamicMaskAttention(16, 2), torch.randn(10, 16)
        with pytest.raises(ValueError, match=rf"cu_seqlens must .*{kind}.*; pass length"):
            IntervalMask.documents(cu_seqlens=bounds)
        with pytest.raises(ValueError, match=rf"cu_seqlens_q must .*{kind}.*; pass max_seqlen_q"):
            dynamic_mask(bias, 3, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
        with pytest.raises(ValueError, match=rf"cu_seqlens must .*{kind}.*; pass max_seqlen"):
            layer(states, cu_seqlens=bounds)
        assert layer(states, cu_seqlens=bounds, max_seqlen=10).shape == states.shape
