# SPDX-License-Identifier: BSD-3-Clause
"""Problems with tiles for more than two thread blocks on every SM of an H200.

Without `wgmma`, smaller blocks compute these at head dimension 64 (cpp/cuda/tile/tile_sizes.cuh).
"""

from __future__ import annotations

import pytest
import torch

from flash_dmattn import dynamic_mask
from support import HALF_TYPES, Problem, Target, assert_forward_is_accurate, randn

BATCH, LENGTH, HEADS, KV_HEADS = 6, 260, 16, 4


@pytest.mark.parametrize("head_dim", [40, 64])
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=["float16", "bfloat16"])
@pytest.mark.parametrize("window", [None, 70, 150])
def test_many_tiles(window: int | None, dtype: torch.dtype, head_dim: int, gpu: str) -> None:
    query = randn(BATCH, LENGTH, HEADS, head_dim, seed=0).to(dtype)
    key, value = (randn(BATCH, LENGTH, KV_HEADS, head_dim, seed=n).to(dtype) for n in (1, 2))
    # The bias grows along the keys: rows find their maximum in any block, mostly in the last.
    bias = randn(BATCH, KV_HEADS, 1, LENGTH, seed=3).to(dtype) + torch.arange(LENGTH).mul(0.02)
    mask = None if window is None else dynamic_mask(bias, window, is_causal=True)
    problem = Problem(query, key, value, mask, bias, causal=True)
    assert_forward_is_accurate(problem, Target(gpu, "cuda"))
