# SPDX-License-Identifier: BSD-3-Clause
"""Sizes of zero and magnitudes that float32 cannot resolve, on the cpu pack."""

from __future__ import annotations

import pytest
import torch

from flash_dmattn import _core, flash_dmattn_func
from flash_dmattn.backends.torch_memory import to_core
from flash_dmattn.loader import pack_for
from support import Target, check, rand_bool, randn, simple_problem


@pytest.mark.parametrize("keys", [0, 1, 20000])
@pytest.mark.parametrize("queries", [7, 9])
def test_batch_of_zero_with_a_mask_that_all_batches_share(queries: int, keys: int) -> None:
    """A mask of batch 1 has rows while the batch has none: they must not be planned."""
    query = torch.empty(0, queries, 1, 8, requires_grad=True)
    key = torch.empty(0, keys, 1, 8, requires_grad=True)
    bias = torch.zeros(1, 1, queries, keys, requires_grad=True)
    mask = torch.ones(1, 1, queries, keys, dtype=torch.bool)
    out = flash_dmattn_func(query, key, key, attn_mask=mask, attn_bias=bias, backend="cpu")
    assert out.shape == (0, queries, 1, 8)
    out.sum().backward()
    assert bias.grad is not None
    assert bias.grad.count_nonzero() == 0


@pytest.mark.parametrize("value", [-1e4, -65504.0, -1e6, -1e9, -1e20, 1e4, 1e9])
@pytest.mark.parametrize("rows", [False, True])
def test_gradients_under_a_bias_of_large_magnitude(value: float, rows: bool) -> None:
    """lse then lacks the digits that the probabilities need."""
    results = []
    for backend in ("cpu", "reference"):
        torch.manual_seed(0)
        tensors = [torch.randn(1, 50, 2, 16, requires_grad=True) for _ in range(3)]
        bias = torch.full((1, 1, 50 if rows else 1, 50), value, requires_grad=True)
        out = flash_dmattn_func(*tensors, attn_bias=bias, backend=backend)
        (out * torch.arange(16.0)).sum().backward()
        results.append([out.detach(), *(tensor.grad for tensor in (*tensors, bias))])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("value", [0.0, 1e4])
def test_more_scores_than_the_backward_pass_saves(softcap: float, value: float) -> None:
    """With 64 heads, 256 columns of a tile are saved; the others are recomputed."""
    problem = simple_problem(
        batch=1, queries=70, keys=700, kv_heads=1, group=64, softcap=softcap, causal=True
    )
    dropped = rand_bool(1, 64, 1, 700, density=0.2)
    problem.bias = (randn(1, 64, 1, 700) + value).masked_fill(dropped, -torch.inf)
    check(problem, Target("cpu", "cpu"))


def test_plan_that_was_not_filled() -> None:
    """A plan of zeros is refused: its zeros must not become divisors."""
    query, mask = torch.randn(1, 9, 1, 8), torch.ones(1, 1, 9, 9, dtype=torch.bool)
    fields, of_mask = [to_core(query)] * 3, to_core(mask)
    problem = _core.Problem(
        pack_for("cpu"), *fields, mask=of_mask, scale=1.0, causal=False, softcap=0.0
    )
    plan = torch.zeros(problem.plan_bytes, dtype=torch.uint8)
    workspace = torch.empty(problem.forward_workspace_bytes, dtype=torch.uint8)
    results = torch.empty_like(query), torch.empty(1, 1, 9)
    with pytest.raises(ValueError, match="not filled"):
        problem.forward(*map(to_core, (*results, plan, workspace)))
