# SPDX-License-Identifier: BSD-3-Clause
"""float32 query, key and value on a GPU: refused by packs, computed by Triton without TF32."""

from __future__ import annotations

import pytest
import torch

from flash_dmattn import flash_dmattn_func
from support import Problem, Target, assert_accurate, rand_bool, randn

pytest.importorskip("triton")


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("bias", [(1, 4, 70, 90), (2, 2, 1, 90)], ids=["rows", "keys"])
def test_triton_is_as_accurate_as_float32(head_dim: int, bias: tuple[int, ...], gpu: str) -> None:
    problem = Problem(
        randn(2, 70, 4, head_dim),
        randn(2, 90, 2, head_dim, seed=1),
        randn(2, 90, 2, head_dim, seed=2),
        rand_bool(2, 1, 1, 90, density=0.8),
        randn(*bias, seed=3),
    )
    gradients = {"dout": randn(2, 70, 4, head_dim, seed=4), "dlse": randn(2, 4, 70, seed=5)}
    got = problem.results(Target(gpu, "triton"), **gradients)
    # TF32 has 10 bits behind the point: it would be a thousand times as far away.
    assert_accurate(got, problem.truth(**gradients), problem.eager(**gradients))


def test_packs_say_who_computes_in_float32(gpu: str) -> None:
    query = torch.zeros(1, 5, 2, 64, device=gpu)
    with pytest.raises(TypeError, match=r"query has dtype float32, .* backend='triton'"):
        flash_dmattn_func(query, query, query)
