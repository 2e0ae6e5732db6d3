# SPDX-License-Identifier: BSD-3-Clause
"""Every tile of a batch is computed once, also where only some sequences are gone through together.

Of three sequences two go together, and then the third: the keys and values of each have 8.4 MB
(cpp/cuda/tile/tile_order.cuh). With 300 queries of 16 heads, keys are not divided over blocks of
threads.
"""

from __future__ import annotations

from support import Problem, Target, assert_forward_is_accurate, randn

BATCH, QUERIES, KEYS, HEADS, HEAD_DIM = 3, 300, 1024, 16, 128


def test_a_group_of_two_sequences_and_one_of_one(gpu: str) -> None:
    query = randn(BATCH, QUERIES, HEADS, HEAD_DIM, seed=0).bfloat16()
    key, value = (randn(BATCH, KEYS, HEADS, HEAD_DIM, seed=n).bfloat16() for n in (1, 2))
    bias = randn(BATCH, HEADS, 1, KEYS, seed=3).bfloat16()
    problem = Problem(query, key, value, None, bias, causal=True)
    assert_forward_is_accurate(problem, Target(gpu, "cuda"))
