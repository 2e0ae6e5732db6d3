# SPDX-License-Identifier: BSD-3-Clause
"""Forget gates as a bias for each key, and pruning below a threshold, against the formula."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import logsigmoid

from flash_dmattn import (
    ForgettingAttention,
    IntervalMask,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    forgetting_bias,
    pruning_threshold,
)
from flash_dmattn.forgetting_formula import running_sums
from support import Target, assert_accurate, randn

LOG_GATE = st.one_of(st.floats(-6, 0), st.just(-math.inf), st.just(-1e30), st.just(0.0))
NAMES = ("query", "key", "value", "log_forget")


def read_by(target: Target, bias: Tensor) -> Tensor:
    """Return a bias that a backend reads: compiled backends do not read float64."""
    return bias.float() if target.backend in ("flex", "triton") else bias


@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 1000])
def test_running_sums(length: int) -> None:
    given = gates(2, 3, length).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: running_sums(x)[..., -3:], (given[:1, :1],))
    for gate in (given, given.mT.contiguous().mT):
        torch.testing.assert_close(running_sums(gate), gate.cumsum(-1), atol=1e-10, rtol=1e-12)


def gates(*shape: int, seed: int = 0) -> Tensor:
    return logsigmoid(3 * randn(*shape, seed=seed) + 1)


def decay(log_forget: Tensor, padding: Tensor | None = None) -> Tensor:
    """Return ``(..., N, N)``: the sum of the gates j + 1 to i, or -inf if row i does not see j."""
    if padding is not None:
        log_forget = log_forget.masked_fill(~padding[:, None], 0)
    token = torch.arange(log_forget.shape[-1])
    i, j, between = token[:, None, None], token[:, None], token
    found = torch.where((j < between) & (between <= i), log_forget[..., None, None, :], 0).sum(-1)
    found = found.masked_fill(token > token[:, None], -math.inf)
    return found if padding is None else found.masked_fill(~padding[:, None, None], -math.inf)


def plain(query: Tensor, key: Tensor, value: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse of attention whose scores have ``(B, {H|Hk}, N, N)`` added."""
    heads, kv_heads = query.shape[2], key.shape[2]
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    key, value = (t.repeat_interleave(heads // kv_heads, 1) for t in (key, value))
    added = added.repeat_interleave(heads // added.shape[1], 1)
    scores = (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5 + added).to(query.dtype)
    seen = added.isfinite().any(-1, keepdim=True)
    probabilities = torch.softmax(scores.masked_fill(~seen, 0), -1).masked_fill(~seen, 0)
    lse = torch.logsumexp(scores.masked_fill(~seen, 0), -1)
    return (probabilities @ value).transpose(1, 2), lse


def problem(dtype: torch.dtype, gate_heads: int, length: int = 37) -> dict[str, Tensor]:
    """Return tensors with H 4 and Hk 2, and float32 gates."""
    return {
        "query": randn(2, length, 4, 16, seed=1, dtype=dtype),
        "key": randn(2, length, 2, 16, seed=2, dtype=dtype),
        "value": randn(2, length, 2, 16, seed=3, dtype=dtype),
        "log_forget": gates(2, gate_heads, length),
    }


def results(tensors: dict[str, Tensor], device: str, compute: Any) -> dict[str, Tensor]:
    leaves = {name: t.detach().to(device).requires_grad_() for name, t in tensors.items()}
    out = compute(**leaves)
    dout = randn(*out.shape, seed=4).to(out.device, out.dtype)
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    named = {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: t.detach().cpu() for name, t in {"out": out, **named}.items()}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("gate_heads", [2, 4])
@pytest.mark.parametrize("prune", [None, -200.0])
def test_out_and_gradients(
    prune: float | None, gate_heads: int, padded: bool, target: Target
) -> None:
    padding = torch.ones(2, 37, dtype=torch.bool)
    if padded:
        padding[0, :9] = padding[1, 20:26] = False

    def ours(query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor) -> Tensor:
        kept = padding.to(target.device) if padded else None
        bias, mask = forgetting_bias(log_forget, prune, padding=kept)
        assert (mask is None) == (prune is None)
        bias = read_by(target, bias)
        out = flash_dmattn_func(
            query, key, value, mask, bias, is_causal=True, backend=target.backend
        )
        assert isinstance(out, Tensor)
        return out

    def formula(query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor) -> Tensor:
        return plain(query, key, value, decay(log_forget, padding))[0]

    for dtype in target.dtypes:
        tensors = problem(dtype, gate_heads)
        exact = {name: tensor.double() for name, tensor in tensors.items()}
        assert_accurate(
            results(tensors, target.device, ours),
            results(exact, "cpu", formula),
            results(tensors, "cpu", formula),
        )


def test_packed_sequences_forget_by_themselves(target: Target) -> None:
    bounds = [0, 0, 13, 14, 37]
    tensors = {name: t[0] for name, t in problem(target.dtypes[0], 2).items()}
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32).to(target.device)

    def packed(query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor) -> Tensor:
        bias, mask = forgetting_bias(log_forget, -4.0, cu_seqlens)
        bias = read_by(target, bias)
        out = flash_dmattn_varlen_func(
            query, key, value, cu_seqlens, cu_seqlens, 23, 23, attn_mask=mask, attn_bias=bias,
            is_causal=True, backend=target.backend,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out

    def apart(query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor) -> Tensor:
        parts = []
        for begin, end in itertools.pairwise(bounds):
            bias, mask = forgetting_bias(log_forget[None, :, begin:end], -4.0)
            bias = read_by(target, bias)
            rows = (t[None, begin:end] for t in (query, key, value))
            parts.append(flash_dmattn_func(*rows, mask, bias, backend=target.backend)[0])
        return torch.cat(parts)

    got, wanted = (results(tensors, target.device, compute) for compute in (packed, apart))
    for name, value in wanted.items():
        tolerance = 32 * torch.finfo(value.dtype).eps
        torch.testing.assert_close(got[name], value, atol=tolerance, rtol=tolerance, msg=name)


@given(data=st.data(), prune=st.sampled_from([0.0, -1e-9, -1.0, -7.5]))
def test_what_is_kept(data: st.DataObject, prune: float) -> None:
    length = data.draw(st.integers(1, 14))
    log_forget = torch.tensor(
        data.draw(st.lists(LOG_GATE, min_size=2 * length, max_size=2 * length)),
        dtype=torch.float64,
    ).reshape(2, 1, length)
    padding = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=2 * length, max_size=2 * length))
    ).reshape(2, length)
    for given_padding in (None, padding):
        _, mask = forgetting_bias(log_forget, prune, padding=given_padding)
        assert mask is not None
        kept, sums = mask.to_bool(length), decay(log_forget, given_padding)
        # Within rounding of the threshold both results are right.
        unclear = (sums - prune).abs() < 1e-12
        assert torch.equal(kept | unclear, (sums >= prune) | unclear)
        if prune == 0.0:
            assert kept.diagonal(dim1=-2, dim2=-1).any() or not padding.any()


def test_what_is_kept_of_packed_sequences() -> None:
    bounds = torch.tensor([0, 9, 9, 10, 40], dtype=torch.int32)
    log_forget = gates(3, 40)
    bias, mask = forgetting_bias(log_forget, -5.0, bounds)
    assert mask is not None
    assert mask.query_length is None
    for begin, end in itertools.pairwise(bounds.tolist()):
        own_bias, own = forgetting_bias(log_forget[None, :, begin:end], -5.0)
        assert own is not None
        torch.testing.assert_close(bias[..., begin:end], own_bias[0])
        alone = IntervalMask(mask.start[None, :, begin:end], mask.end[None, :, begin:end])
        assert torch.equal(alone.to_bool(end - begin), own.to_bool(end - begin))


@pytest.mark.parametrize("prune", [None, -16.0])
@pytest.mark.parametrize("lowest", [-math.inf, torch.finfo(torch.float32).min, -1e6])
def test_a_gate_that_forgets_all(prune: float | None, lowest: float, target: Target) -> None:
    tensors = problem(target.dtypes[0], 2)
    tensors["log_forget"][:, :, 11] = tensors["log_forget"][0, 1, 30] = lowest

    def forgotten(query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor) -> Tensor:
        bias, mask = forgetting_bias(log_forget, prune)
        assert bias.isfinite().all()
        bias = read_by(target, bias)
        out = flash_dmattn_func(
            query, key, value, mask, bias, is_causal=True, backend=target.backend
        )
        assert isinstance(out, Tensor)
        return out

    got = results(tensors, target.device, forgotten)
    assert all(tensor.isfinite().all() for tensor in got.values())
    after = results(
        {name: t[:, :, 11:] if name == "log_forget" else t[:, 11:] for name, t in tensors.items()},
        target.device,
        forgotten,
    )
    # A float32 bias of 1000 or more is rounded.
    rounded = 0.0 if target.backend in ("cpu", "reference") and target.device == "cpu" else 1e-3
    tolerance = 64 * torch.finfo(target.dtypes[0]).eps + (rounded if prune is None else 0.0)
    torch.testing.assert_close(got["out"][:, 11:], after["out"], atol=tolerance, rtol=tolerance)


def test_nothing_flows_to_what_cannot_be_seen() -> None:
    log_forget = gates(1, 1, 6).requires_grad_()
    padding = torch.tensor([[False, True, True, False, True, True]])
    bias, mask = forgetting_bias(log_forget, -30.0, padding=padding)
    assert mask is not None
    assert torch.equal(bias.isneginf()[0, 0, 0], ~padding[0])
    bias[bias.isfinite()].sum().backward()
    assert log_forget.grad is not None
    assert torch.equal(log_forget.grad[0, 0] != 0, padding[0])


def test_no_tokens() -> None:
    bias, mask = forgetting_bias(torch.zeros(2, 3, 0), -1.0)
    assert mask is not None
    assert bias.shape == (2, 3, 1, 0)
    assert mask.to_bool(0).shape == (2, 3, 0, 0)


@given(
    bound=st.floats(0, 6),
    error=st.sampled_from([0.5, 1e-2, 1e-4]),
    length=st.integers(2, 60),
    seed=st.integers(0, 1000),
)
def test_the_threshold_bounds_what_is_dropped(
    bound: float, error: float, length: int, seed: int
) -> None:
    prune = pruning_threshold(bound, length, error=error)
    generator = torch.Generator().manual_seed(seed)
    # The worst case of the bound: all old keys have large scores and are at the threshold.
    scores = torch.full((length,), bound, dtype=torch.float64)
    scores[-1] = -bound
    log_forget = torch.zeros(1, 1, length, dtype=torch.float64)
    log_forget[..., -1] = prune - torch.rand((), generator=generator).double() * 0.01
    _, mask = forgetting_bias(log_forget, prune)
    assert mask is not None
    kept = mask.to_bool(length)[0, 0, -1]
    weights = torch.softmax(scores + decay(log_forget)[0, 0, -1], -1)
    assert kept.tolist() == [False] * (length - 1) + [True]
    assert weights[~kept].sum() <= error


GOOD = torch.zeros(2, 3, 7)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "prune above 0": (
        {"prune": 0.5},
        ValueError,
        r"prune must be a finite log decay of at most 0, .* got 0.5",
    ),
    "prune of minus infinity": ({"prune": -math.inf}, ValueError, "prune must be a finite"),
    "gates above 0": (
        {"log_forget": torch.full((2, 3, 7), 0.25), "prune": -1.0},
        ValueError,
        "log_forget must be at most 0 where keys are pruned, .* got 0.25; logsigmoid makes",
    ),
    "no heads": (
        {"log_forget": torch.zeros(2, 7)},
        ValueError,
        r"log_forget must have shape \(B, H, N\), got \(2, 7\)",
    ),
    "packed with a batch": (
        {"cu_seqlens": torch.tensor([0, 7], dtype=torch.int32)},
        ValueError,
        r"log_forget must have shape \(H, total\) with cu_seqlens, got \(2, 3, 7\)",
    ),
    "bounds that end early": (
        {
            "log_forget": torch.zeros(3, 7),
            "cu_seqlens": torch.tensor([0, 4, 6], dtype=torch.int32),
        },
        ValueError,
        "cu_seqlens must rise from 0 to 7, the tokens of log_forget, got 0 to 6",
    ),
    "integers": (
        {"log_forget": torch.zeros(2, 3, 7, dtype=torch.int64)},
        TypeError,
        "log_forget must have a floating-point dtype of at least 16 bits, got torch.int64",
    ),
    "padding of another length": (
        {"padding": torch.ones(2, 6, dtype=torch.bool)},
        ValueError,
        r"padding must have log_forget's shape \(B, N\) = \(2, 7\), got \(2, 6\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name: str) -> None:
    changes, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        forgetting_bias(**{"log_forget": GOOD, **changes})


def test_gates_without_values_are_not_looked_at() -> None:
    """The values of torch.vmap's and of fake tensors are not read."""
    gates = -torch.rand(3, 2, 3, 7)
    bounds = torch.tensor([0, 4, 7], dtype=torch.int32)

    def ends(each: Tensor) -> tuple[Tensor, Tensor]:
        bias, mask = forgetting_bias(each, prune=-1.0)
        assert mask is not None
        return bias, mask.end

    want = [torch.stack(parts) for parts in zip(*map(ends, gates), strict=True)]
    torch.testing.assert_close(list(torch.vmap(ends)(gates)), want)
    layer = ForgettingAttention(8, 2, prune=-1.0)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        bias, _ = forgetting_bias(mode.from_tensor(gates[0, 0]), -1.0, mode.from_tensor(bounds))
        assert bias.shape == (3, 1, 7)
        assert layer(torch.empty(2, 5, 8)).shape == (2, 5, 8)
