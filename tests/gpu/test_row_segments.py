# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of rows in many segments, each with blocks of the keys that it keeps.

CUDA packs use them for masks with a known `max_kept`, without deterministic=True.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from drawn.buffers import poisoned_buffers
from flash_dmattn import IntervalMask, dynamic_mask, flash_dmattn_varlen_func
from support import Problem, Target, assert_accurate, cotangent, randn

HEADS, KV_HEADS = 4, 2


def check_gradients(
    mask: Tensor | IntervalMask,
    bias: Tensor,
    target: Target,
    *,
    queries: int,
    batch: int = 1,
    head_dim: int = 32,
) -> None:
    """Check a causal problem; keys that no query keeps hold NaN for the backend.

    The second run also poisons plans and workspaces. Other tests of poisoned buffers ask for equal
    bits and thus for kernels without segments.
    """
    assert isinstance(mask, IntervalMask)
    dtype, keys = torch.bfloat16, bias.shape[-1]
    kept = mask.to_bool(queries) & (bias > -torch.inf)
    kept = kept & torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    dropped = ~kept.any(2).expand(batch, KV_HEADS, keys)
    query, *key_value, dout = (
        randn(batch, rows, heads, head_dim, dtype=dtype, seed=seed)
        for seed, (rows, heads) in enumerate(
            [(queries, HEADS), (keys, KV_HEADS), (keys, KV_HEADS), (queries, HEADS)]
        )
    )
    poisoned = [x.masked_fill(dropped.transpose(1, 2)[..., None], torch.nan) for x in key_value]
    dout = cotangent(dout)
    common: dict[str, Any] = {"mask": mask, "bias": bias.to(dtype), "causal": True}
    clean = Problem(query, *key_value, **common)
    problem = Problem(query, *poisoned, **common)
    got = problem.results(target, dout=dout)
    with poisoned_buffers() as buffers:
        got_from_poison = problem.results(target, dout=dout)
    assert buffers.guards_are_whole(), "bytes beside a buffer have been written"
    truth, eager = clean.truth(dout=dout), clean.eager(dout=dout)
    assert_accurate(got, truth, eager)
    assert_accurate(got_from_poison, truth, eager)


def intervals(keys: int, seed: int, longest: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    start = torch.arange(keys, dtype=torch.int32).expand(1, KV_HEADS, keys)
    length = torch.randint(-20, longest, start.shape, generator=generator, dtype=torch.int32)
    return start.contiguous(), start + length


@pytest.mark.parametrize(
    ("length", "window", "head_dim"),
    [(1300, 150, 64), (2600, 400, 64), (1100, 700, 128), (600, 40, 256)],
)
def test_selected_keys(length: int, window: int, head_dim: int, gpu: str) -> None:
    bias = randn(1, KV_HEADS, 1, length, dtype=torch.bfloat16, seed=4)
    bias = bias.masked_fill(randn(*bias.shape, seed=5) > 1.5, -torch.inf)
    mask = dynamic_mask(bias, window, True)
    check_gradients(mask, bias, Target(gpu, "cuda"), queries=length, head_dim=head_dim)


@pytest.mark.parametrize("head_dim", [33, 64])
def test_more_keys_than_a_bucket(head_dim: int, gpu: str) -> None:
    """Without `max_kept` there are no segments: blocks end at 2048 kept keys."""
    keys = 2400
    mask = IntervalMask(*intervals(keys, seed=6, longest=900))
    bias = randn(1, KV_HEADS, 1, keys, dtype=torch.bfloat16, seed=4)
    check_gradients(mask, bias, Target(gpu, "cuda"), queries=keys, head_dim=head_dim)


def test_keys_that_all_heads_and_the_batch_share(gpu: str) -> None:
    bias = randn(1, 1, 1, 1200, dtype=torch.bfloat16, seed=4)
    mask = dynamic_mask(bias, 100, True)
    check_gradients(mask, bias, Target(gpu, "cuda"), queries=1200, batch=2)


def test_every_key_is_kept_for_as_long(gpu: str) -> None:
    bias = torch.linspace(0, 4, 1400).expand(1, KV_HEADS, 1, 1400).to(torch.bfloat16)
    mask = IntervalMask.sliding_window(99, 0, 1400, 1400)
    check_gradients(mask, bias, Target(gpu, "cuda"), queries=1400)


def test_rows_that_keep_nothing(gpu: str) -> None:
    """No key block computes dQ of such a segment."""
    start, end = intervals(1700, 6, 300)
    rows = torch.arange(1700)
    end = torch.where((rows > 300) & (rows < 1300), start, end)
    bias = randn(1, KV_HEADS, 1, 1700, seed=4)
    mask = IntervalMask(start, end, max_kept=300)
    check_gradients(mask, bias, Target(gpu, "cuda"), queries=1700)


@pytest.mark.parametrize("max_kept", [1, 60])
def test_a_bound_that_is_not_true(max_kept: int, gpu: str) -> None:
    """A max_kept that is too small leaves segments without room for keys or sums of shared keys."""
    start, end = intervals(1300, 7, 1000)
    bias = randn(1, KV_HEADS, 1, 1300, seed=4)
    mask = IntervalMask(start, end, max_kept=max_kept)
    check_gradients(mask, bias, Target(gpu, "cuda"), queries=1300)


def test_fewer_queries_than_keys(gpu: str) -> None:
    bias = randn(1, KV_HEADS, 1, 2000, dtype=torch.bfloat16, seed=4)
    mask = dynamic_mask(bias, 100, True, query_length=1150)
    check_gradients(mask, bias, Target(gpu, "cuda"), queries=1150)


def check_packed_gradients(
    lengths: list[int],
    window: int,
    gpu: str,
    seed: int,
    *,
    max_kept: int | None = None,
    head_dim: int = 64,
    shared_bias: bool = False,
) -> None:
    """Check packed causal sequences, each against its own results, with poisoned buffers.

    Args:
        lengths: of the sequences, as many queries as keys.
        max_kept: what the mask says that a row keeps at most, in place of ``window``.
        shared_bias: one bias, and one list of kept keys, for all heads.
    """
    total, dtype = sum(lengths), torch.bfloat16
    shapes = [(total, HEADS), *[(total, KV_HEADS)] * 2, (total, HEADS)]
    *tensors, dout = (
        randn(*shape, head_dim, dtype=dtype, seed=seed + n) for n, shape in enumerate(shapes)
    )
    dout = cotangent(dout)
    bias = randn(1 if shared_bias else KV_HEADS, 1, total, dtype=dtype, seed=seed + 9)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    places = [slice(end - n, end) for n, end in zip(lengths, ends, strict=True) if n]
    masks = [
        dynamic_mask(bias[None, ..., place], window, True, key_length=place.stop - place.start)
        for place in places
    ]
    parts = [mask for mask in masks if isinstance(mask, IntervalMask)]
    assert len(parts) == len(masks)
    start, end = (torch.cat([getattr(m, name)[0] for m in parts], 1) for name in ("start", "end"))
    mask = IntervalMask(start, end, max_kept=max_kept or window)
    bounds = torch.tensor([0, *ends], dtype=torch.int32, device=gpu)

    names = ("query", "key", "value", "bias")
    leaves = [tensor.to(gpu).requires_grad_() for tensor in (*tensors, bias)]
    with poisoned_buffers() as buffers:
        out = flash_dmattn_varlen_func(
            *leaves[:3],
            bounds,
            bounds,
            max(lengths),
            max(lengths),
            attn_mask=mask.to(gpu),
            attn_bias=leaves[3],
            is_causal=True,
        )
        gradients = torch.autograd.grad(out, leaves, dout.to(gpu))
    assert buffers.guards_are_whole(), "bytes beside a buffer have been written"
    for place, own_mask in zip(places, parts, strict=True):
        inputs = [tensor[None, place] for tensor in tensors]
        problem = Problem(*inputs, mask=own_mask, bias=bias[None, ..., place], causal=True)
        got = {"out": out.detach()[None, place]}
        for name, gradient in zip(names, gradients, strict=True):
            own = gradient[None, ..., place] if name == "bias" else gradient[None, place]
            got[f"d{name}"] = own
        truth, eager = problem.truth(dout=dout[None, place]), problem.eager(dout=dout[None, place])
        compared = {name: value.cpu() for name, value in got.items() if name in truth}
        assert len(compared) == 5
        assert_accurate(compared, {n: truth[n] for n in compared}, {n: eager[n] for n in compared})


@pytest.mark.parametrize("shared_bias", [False, True])
@pytest.mark.parametrize(
    ("lengths", "head_dim"),
    [([1100, 5, 0, 300, 257], 64), ([600, 700, 3], 128), ([900, 1], 256), ([400] * 12, 96)],
)
def test_packed_sequences(
    lengths: list[int], head_dim: int, shared_bias: bool, gpu: str, seed: int
) -> None:
    check_packed_gradients(lengths, 90, gpu, seed, head_dim=head_dim, shared_bias=shared_bias)


@pytest.mark.parametrize("max_kept", [1, 20])
def test_a_bound_that_is_not_true_of_a_packed_sequence(max_kept: int, gpu: str, seed: int) -> None:
    """A max_kept that one sequence exceeds does not change the key sums of the other sequences."""
    check_packed_gradients([1300, 40, 700], 60, gpu, seed, max_kept=max_kept)
