# SPDX-License-Identifier: BSD-3-Clause
"""Large loss scales: overflow of float16 must stay visible to a GradScaler."""

from __future__ import annotations

import pytest
import torch

from drawn.calls import Call
from support import Target

from .kinds import Draw

LARGEST = torch.finfo(torch.float16).max


def scaled_call(seed: int, head_dim: int, loss_scale: float) -> Call:
    draw = Draw(seed, torch.float16, head_dim)
    query, key, value = (draw.randn(1, 70, 2, head_dim) for _ in range(3))
    dout = draw.randn(1, 70, 2, head_dim)
    # Each row keeps two keys of nearly equal weight, so dS is about dO . (v_1 - v_2) / 4.
    bias = torch.full((1, 1, 1, 70), -torch.inf)
    bias[..., :2] = 0
    dlse = torch.zeros(1, 2, 70)
    return Call(query * 0.1, key, 2 * value, dout * loss_scale, dlse, None, bias)


def score_gradients(call: Call) -> torch.Tensor:
    query, key, value, dout = (
        t.double().transpose(1, 2) for t in (call.query, call.key, call.value, call.dout)
    )
    scores = query @ key.mT * query.shape[-1] ** -0.5 + call.bias.double()
    probabilities = scores.softmax(-1)
    dp = dout @ value.mT
    return probabilities * (dp - (probabilities * dp).sum(-1, keepdim=True))


@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_overflow_of_float16_is_seen(head_dim: int, gpu: str, seed: int) -> None:
    """Score gradients above 65504 make dQ and dK non-finite, as in eager float16."""
    call = scaled_call(seed, head_dim, 2.0**13)
    assert score_gradients(call).abs().max() > 1.1 * LARGEST
    results = call.to(gpu).results()
    assert not results["dquery"].isfinite().all()
    assert not results["dkey"].isfinite().all()
    assert results["dbias"].isfinite().all()  # sums score gradients before they are rounded


@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_gradients_scale_with_the_loss(head_dim: int, pack_target: Target, seed: int) -> None:
    factor = 2.0**10
    call, plain = (scaled_call(seed, head_dim, scale) for scale in (factor, 1.0))
    assert LARGEST / 10 < score_gradients(call).abs().max() < LARGEST
    results, expected = (one.to(pack_target.device).results() for one in (call, plain))
    for name in ("dquery", "dkey", "dvalue", "dbias"):
        wanted = expected[name].double() * factor
        assert (results[name].double() - wanted).norm() <= 1e-3 * wanted.norm(), name
