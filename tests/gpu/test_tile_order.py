# SPDX-License-Identifier: BSD-3-Clause
"""Every tile of a batch is computed once, even if sequences or heads form groups.

cpp/cuda/route/orders.h defines the groups: their keys and values have at most 21 MB.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func
from support import Problem, Target, assert_forward_is_accurate, randn

BATCH, QUERIES, KEYS, HEADS, HEAD_DIM = 3, 300, 1024, 16, 128


def test_a_group_of_two_sequences_and_one_of_one(gpu: str) -> None:
    """With 300 queries of 16 heads, keys are not divided over thread blocks."""
    query = randn(BATCH, QUERIES, HEADS, HEAD_DIM, seed=0).bfloat16()
    key, value = (randn(BATCH, KEYS, HEADS, HEAD_DIM, seed=n).bfloat16() for n in (1, 2))
    bias = randn(BATCH, HEADS, 1, KEYS, seed=3).bfloat16()
    problem = Problem(query, key, value, None, bias, causal=True)
    assert_forward_is_accurate(problem, Target(gpu, "cuda"))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 9000])
def test_groups_of_heads(packed: bool, window: int | None, gpu: str) -> None:
    """Groups of two of six KV heads, or three with the window; some rows are checked."""
    length, heads, kv_heads = 16421, 24, 6
    query = randn(length, heads, HEAD_DIM, seed=0).bfloat16().to(gpu)
    key, value = (randn(length, kv_heads, HEAD_DIM, seed=n).bfloat16().to(gpu) for n in (1, 2))
    bias = randn(kv_heads, 1, length, seed=3).bfloat16().to(gpu)
    lengths = [0, 16400, length] if packed else [0, length]
    options: dict[str, Any] = {"is_causal": True, "window_size": window, "backend": "cuda"}
    if packed:
        bounds = torch.tensor(lengths, dtype=torch.int32, device=gpu)
        packing = (bounds, bounds, 16400, 16400)
        out = flash_dmattn_varlen_func(query, key, value, *packing, attn_bias=bias, **options)
    else:
        inputs = [x[None] for x in (query, key, value)]
        out = flash_dmattn_func(*inputs, attn_bias=bias[None], **options)
    assert isinstance(out, torch.Tensor)
    computed = out.reshape(length, heads, HEAD_DIM).double()
    rows = torch.arange(0, length, 61, device=gpu)
    for begin, past in itertools.pairwise(lengths):
        some = rows[(rows >= begin) & (rows < past)]
        dropped = torch.arange(begin, past, device=gpu) > some[:, None]
        for head in range(heads):
            own = head * kv_heads // heads
            added = bias[own, 0, begin:past].double().masked_fill(dropped, -torch.inf)
            if window is not None:
                others = added.sort(descending=True, stable=True).indices[:, window:]
                added = added.scatter(1, others, -torch.inf)
            scores = query[some, head].double() @ key[begin:past, own].double().T
            weights = (scores * HEAD_DIM**-0.5 + added).softmax(1)
            truth = weights @ value[begin:past, own].double()
            torch.testing.assert_close(computed[some, head], truth, atol=1e-2, rtol=1e-2)
