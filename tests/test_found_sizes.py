# SPDX-License-Identifier: BSD-3-Clause
"""Sizes that are symbols for torch.compile, which finds their values while tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_dmattn import KeptKeys, attention_reference, dynamic_mask, flash_dmattn_func
from flash_dmattn.integrations import parallel_forgetting_attn

H, HK, D = 4, 2, 8


def _mask_per_key(query: Tensor, key: Tensor) -> Any:
    found = query.reshape(4, 4, H, D)
    mask = torch.ones(4, HK, 4, dtype=torch.bool)
    return flash_dmattn_func(found, key, key, mask, is_causal=True)


def _state(query: Tensor, key: Tensor) -> Any:
    tokens = key, key, torch.linspace(0, 1, 10).expand(2, HK, 1, 10)
    return KeptKeys(3, keep_last=2).updated(*tokens).attend(query, *tokens)


def _forgetting(query: Tensor, key: Tensor) -> Any:
    found, gates = key.reshape(2, 10, HK, D), torch.full((2, 10, H), -0.5)
    return parallel_forgetting_attn(query, found, key, gates, prune=-3.0)


def _selection(query: Tensor, key: Tensor) -> Any:
    seen = key.new_ones(2, 10, dtype=torch.bool)
    return dynamic_mask(key.sum(-1).transpose(1, 2), 4, True, seen).to_bool(key.shape[1])


def _formula(query: Tensor, key: Tensor) -> Any:
    return attention_reference(query, key, key, causal=True)[0]


@pytest.mark.parametrize(
    ("call", "batch", "length"),
    [
        (_mask_per_key, 4, 4),
        (_state, 2, 10),
        (_forgetting, 2, 10),
        (_selection, 2, 10),
        (_formula, 2, 10),
    ],
)
def test_sizes_found_by_compilers_fit_as_others_do(
    call: Callable[..., Any], batch: int, length: int
) -> None:
    query, key = torch.randn(batch, length, H, D), torch.randn(batch, length, HK, D)
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(query, key), call(query, key))
