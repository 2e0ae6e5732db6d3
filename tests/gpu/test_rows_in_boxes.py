# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of queries in larger tensors, and of tiles with some rows that keep nothing.

Hopper's kernel of all gradients copies the rows of a step by TMA boxes. It copies them one by one
if strides or rows without a gradient do not allow boxes.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_dmattn import IntervalMask, flash_dmattn_func
from support import randn

HEADS, KV_HEADS = 4, 2
EMPTY = slice(100, 141)  # rows that keep nothing


def mask_without_rows(length: int, device: str) -> IntervalMask:
    key = torch.arange(length, dtype=torch.int32, device=device).expand(1, KV_HEADS, length)
    early = key < EMPTY.start
    start = torch.where(early, key, key.clamp(min=EMPTY.stop))
    return IntervalMask(start, torch.where(early, EMPTY.start, start + 90))


def gradients(
    query: Tensor, key: Tensor, value: Tensor, mask: IntervalMask, dout: Tensor
) -> tuple[Tensor, ...]:
    query, key, value = (x.detach().requires_grad_() for x in (query, key, value))
    out = flash_dmattn_func(query, key, value, mask, is_causal=False)
    assert isinstance(out, Tensor)
    return torch.autograd.grad(out, (query, key, value), dout)


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    """Compare up to rounding, since the order of sums differs."""
    for x, y in zip(got, want, strict=True):
        assert x.isfinite().all()
        torch.testing.assert_close(x, y, rtol=2**-6, atol=2**-6 * y.abs().max().item())


@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize("length", [300, 1000])
def test_rows_of_larger_tensors(head_dim: int, length: int, gpu: str) -> None:
    def part(seed: int, heads: int) -> Tensor:
        whole = randn(2, length + 3, heads + 2, 2 * head_dim, dtype=torch.bfloat16, seed=seed)
        return whole.to(gpu)[:, 3:, 1:-1, :head_dim]

    query, dout = part(1, HEADS), part(2, HEADS)
    key, value = part(3, KV_HEADS), part(4, KV_HEADS)
    mask = mask_without_rows(length, gpu)
    got = gradients(query, key, value, mask, dout)
    query, key, value, dout = (x.contiguous() for x in (query, key, value, dout))
    assert_same(got, gradients(query, key, value, mask, dout))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_of_a_batch_that_is_one(head_dim: int, gpu: str) -> None:
    """TMA boxes do not support a stride of 0."""
    query, dout = (
        randn(1, 333, HEADS, head_dim, dtype=torch.bfloat16, seed=seed).to(gpu) for seed in (1, 2)
    )
    key, value = (
        randn(3, 333, KV_HEADS, head_dim, dtype=torch.bfloat16, seed=seed).to(gpu)
        for seed in (3, 4)
    )
    mask = mask_without_rows(333, gpu)
    query, dout = (x.expand(3, -1, -1, -1) for x in (query, dout))
    got = gradients(query, key, value, mask, dout)
    assert_same(got, gradients(query.contiguous(), key, value, mask, dout.contiguous()))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_that_keep_nothing_may_hold_anything(head_dim: int, gpu: str) -> None:
    tensors = [
        randn(1, 400, heads, head_dim, dtype=torch.bfloat16, seed=seed).to(gpu)
        for seed, heads in enumerate([HEADS, KV_HEADS, KV_HEADS, HEADS])
    ]
    mask = mask_without_rows(400, gpu)
    query, key, value, dout = tensors
    want = gradients(query, key, value, mask, dout)
    query, dout = query.clone(), dout.clone()
    query[:, EMPTY] = torch.nan
    dout[:, EMPTY] = torch.nan
    got = gradients(query, key, value, mask, dout)
    assert not got[0][:, EMPTY].any()
    assert_same(got, want)
