# SPDX-License-Identifier: BSD-3-Clause
"""The contestant for the extension module of 1.2.2, on a stand-in module with its functions."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.cases import PASSES, Case, Pass, make_inputs
from benchmarks.contestants import FlashDmattn
from benchmarks.earlier import Earlier

CASE = Case("sweep", heads=2, kv_heads=1, head_dim=32, length=128, window=20, per_query=True)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
    key, value = (t.repeat_interleave(query.shape[2] // t.shape[2], 2) for t in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5 + bias
    kept = mask & torch.ones(scores.shape[2:], dtype=torch.bool).tril()
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~kept, -torch.inf).softmax(-1), value)


def fwd(*arguments: Any) -> tuple[Tensor, Tensor, None]:
    *tensors, out, scale, causal, softcap, with_probabilities = arguments
    assert (out, causal, softcap, with_probabilities) == (None, True, 0.0, False)
    assert scale == CASE.head_dim**-0.5
    query = tensors[0]
    return (
        attention(*tensors),
        query.new_zeros(query.shape[0], query.shape[2], query.shape[1]),
        None,
    )


def bwd(*arguments: Any) -> None:
    dout, query, key, value, mask, bias, _, lse, *gradients = arguments[:12]
    assert lse.shape == (query.shape[0], query.shape[2], query.shape[1])
    assert arguments[13:] == (True, 0.0, False)
    leaves = [t.detach().requires_grad_() for t in (query, key, value, bias)]
    with torch.enable_grad():
        out = attention(leaves[0], leaves[1], leaves[2], mask, leaves[3])
    for sums, gradient in zip(gradients, torch.autograd.grad(out, leaves, dout), strict=True):
        assert not sums.any()
        sums += gradient


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_dmattn_cuda", SimpleNamespace(fwd=fwd, bwd=bwd))


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.usefixtures("module")
def test_it_computes_what_ours_does(which: Pass) -> None:
    inputs = make_inputs(CASE)
    contestants = Earlier(CASE, inputs), FlashDmattn(CASE, inputs, form="boolean")
    for contestant in contestants:
        contestant.prepare(which)
    got, ours = (contestant.results(which) for contestant in contestants)
    for one, other in zip(got, ours, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("module")
def test_keys_that_it_would_pad_are_refused() -> None:
    case = Case("short", length=100, window=20, per_query=True)
    with pytest.raises(ValueError, match="length is 100; it must be a multiple of 128"):
        Earlier(case, make_inputs(case))
