# SPDX-License-Identifier: BSD-3-Clause
"""Rows whose maximum comes late, or is outside of the range in which kernels use scores directly.

The Hopper kernels add biases in the product of query and key and take a row's maximum from its
first key block. They recompute a block if that maximum is too small. Rows here have several blocks.
Short sequences and longer ones have separate kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from support import HALF_TYPES, Problem, Target, assert_accurate, randn

KEYS = [450, 700]


def ascending(bias: Tensor) -> Tensor:
    return torch.arange(bias.shape[-1]).mul(0.5).expand_as(bias)


def changed(bias: Tensor, keys: slice, value: float) -> Tensor:
    bias = bias.clone()
    bias[..., keys] = value
    return bias


BIASES: dict[str, Callable[[Tensor, torch.finfo], Tensor]] = {
    "some": lambda bias, _: bias,
    "ascending": lambda bias, _: ascending(bias),
    "ascending from -500": lambda bias, _: ascending(bias) - 500,
    "descending": lambda bias, _: -ascending(bias),
    "wide": lambda bias, _: 1e4 * bias,
    "first -inf": lambda bias, _: changed(bias, slice(300), -torch.inf),
    "one of 30000": lambda bias, _: changed(bias, slice(400, 401), 30000.0),
    "one large": lambda bias, info: changed(bias, slice(400, 401), info.max / 2),
    "lowest here and there": lambda bias, info: changed(bias, slice(100, 500, 3), info.min),
    "first the lowest": lambda bias, info: changed(bias, slice(300), info.min),
}


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("name", BIASES)
def test_biases(name: str, keys: int, head_dim: int, dtype: torch.dtype, gpu: str) -> None:
    query, key, value = (randn(1, keys, 2, head_dim, seed=n).to(dtype) for n in range(3))
    bias = BIASES[name](randn(1, 2, 1, keys, seed=3), torch.finfo(dtype))
    # As a base-2 score, the lowest bfloat16 is outside of float32.
    names = ("out",) if name == "first the lowest" else ("out", "lse")
    check(Problem(query, key, value, None, bias, causal=True), names, gpu)


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=["float16", "bfloat16"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize(
    ("factor", "options"),
    [(30.0, {}), (1.0, {"scale": 3.0}), (1.0, {"scale": -0.2}), (1.0, {"scale": 0.0}),
     (1.0, {"scale": 1e-12}), (3.0, {"softcap": 5.0})],
    ids=["large query", "large scale", "negative scale", "no scale", "small scale", "softcap"],
)  # fmt: skip
def test_scales(
    factor: float,
    options: dict[str, float],
    keys: int,
    biased: bool,
    dtype: torch.dtype,
    gpu: str,
) -> None:
    query, key, value = (randn(1, keys, 2, 64, seed=n).to(dtype) for n in range(3))
    bias = randn(1, 2, 1, keys, seed=3) if biased else None
    check(
        Problem(factor * query, key, value, None, bias, causal=True, **options), ("out", "lse"), gpu
    )


def check(problem: Problem, names: tuple[str, ...], gpu: str) -> None:
    dout = torch.zeros_like(problem.query)
    got = problem.results(Target(gpu, "cuda"), dout=dout)
    want, eager = (results(dout=dout) for results in (problem.truth, problem.eager))
    assert_accurate(*({name: part[name] for name in names} for part in (got, want, eager)))


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("bias", [torch.nan, torch.inf])
def test_a_bias_that_is_no_number_reaches_all_rows_that_see_it(
    bias: float, keys: int, gpu: str
) -> None:
    query, key, value = (randn(1, keys, 2, 64, seed=n).bfloat16() for n in range(3))
    biases = changed(randn(1, 2, 1, keys, seed=3), slice(400, 401), bias)
    out = Problem(query, key, value, None, biases, causal=True).results(
        Target(gpu, "cuda"), dout=torch.zeros_like(query)
    )["out"]
    assert out[:, :400].isfinite().all()
    assert out[:, 400:].isnan().all()
