# SPDX-License-Identifier: BSD-3-Clause
"""float32 query, key and value on a GPU: packs refuse them, Triton computes them without TF32."""

from __future__ import annotations

import pytest
import torch

from flash_dmattn import flash_dmattn_func
from flash_dmattn.integrations import evoformer_attention, triangle_attention
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
    # TF32 has a 10-bit mantissa: its error would be a thousand times as large.
    assert_accurate(got, problem.truth(**gradients), problem.eager(**gradients))


def test_packs_say_who_computes_in_float32(gpu: str) -> None:
    query = torch.zeros(1, 5, 2, 64, device=gpu)
    with pytest.raises(TypeError, match=r"query has dtype float32, .* backend='triton'"):
        flash_dmattn_func(query, query, query)


def test_functions_of_structural_biology_choose_triton(gpu: str) -> None:
    shapes = [(1, 6, 4, 20, 32)] * 3 + [(1, 1, 4, 20, 20)]
    tensors = [randn(*shape, seed=n).to(gpu) for n, shape in enumerate(shapes)]
    query, key, value, bias = (t.double() for t in tensors)
    scores = query @ key.transpose(-1, -2) * 32**-0.5 + bias
    want = (torch.softmax(scores, -1) @ value).float()
    torch.testing.assert_close(triangle_attention(*tensors), want, atol=3e-6, rtol=3e-6)
    query, key, value = (t.transpose(2, 3) for t in tensors[:3])
    out = evoformer_attention(query, key, value, [None, tensors[3]])
    torch.testing.assert_close(out.transpose(2, 3), want, atol=3e-6, rtol=3e-6)
