# SPDX-License-Identifier: BSD-3-Clause
"""The order in which blocks of a key mask process the rows, and their division over a GPU.

With more than 4096 keys, cpp/cuda/backward/key_parts.cuh chooses the length of parts and their
order: by rows if few blocks are divided, by heads if many are. With fewer keys and heads of 128,
the share of kept keys sets how the query heads of a group take turns.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drawn.buffers import poisoned_buffers
from support import Problem, Target, assert_accurate, cotangent, randn


@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "keys", "kept", "head_dim"),
    [
        pytest.param(8, 2, 1500, 4500, 300, 96, id="few, divided"),
        pytest.param(4, 1, 700, 4200, 40, 40, id="one block"),
        pytest.param(6, 6, 150, 4300, 0, 64, id="none"),
        pytest.param(24, 24, 300, 4500, 2000, 128, id="groups of heads"),
        pytest.param(80, 20, 100, 4400, 4390, 64, id="nearly all of many heads"),
        pytest.param(8, 4, 260, 4200, 900, 200, id="wide"),
        pytest.param(8, 2, 300, 900, 200, 128, id="no schedule, few"),
        pytest.param(8, 2, 300, 900, 700, 128, id="no schedule, many"),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients(
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    kept: int,
    head_dim: int,
    causal: bool,
    gpu: str,
    seed: int,
) -> None:
    """Gradients are right for any division and any earlier content of plans and workspaces."""
    dtype, target = torch.bfloat16, Target(gpu, "cuda")
    bias = randn(1, kv_heads, 1, keys, seed=seed + 4).to(dtype)
    mask = torch.zeros(1, kv_heads, 1, keys, dtype=torch.bool)
    mask.scatter_(3, randn(1, kv_heads, 1, keys, seed=seed + 5).topk(kept, dim=3).indices, True)
    query, key, value, dout = (
        randn(1, rows, count, head_dim, dtype=dtype, seed=seed + n)
        for n, (rows, count) in enumerate(
            [(queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads)]
        )
    )
    dropped = ~mask[:, :, 0].transpose(1, 2)[..., None]
    common: dict[str, Any] = {"mask": mask, "bias": bias, "causal": causal}
    clean = Problem(query, key, value, **common)
    problem = Problem(query, *(x.masked_fill(dropped, torch.nan) for x in (key, value)), **common)
    dout = cotangent(dout)
    with poisoned_buffers() as buffers:
        got = problem.results(target, dout=dout)
    assert buffers.guards_are_whole(), "bytes beside a buffer have been written"
    assert_accurate(got, clean.truth(dout=dout), clean.eager(dout=dout))
