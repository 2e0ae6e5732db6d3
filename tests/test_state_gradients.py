# SPDX-License-Identifier: BSD-3-Clause
"""In-place changes of a state do not change the gradients of earlier calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flash_dmattn import AttentionCache, DynamicMaskAttention, KeptKeys
from flash_dmattn.modules.heads import normalize_and_rotate
from flash_dmattn.modules.projections import project_to_heads
from states import make_layer, states

Tokens = tuple[Tensor, Tensor, Tensor]
MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
PERMUTED = torch.tensor([1, 0])


def batch_of(count: int, seed: int = 0) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, 2, count, 2, 8, generator=generator)
    return key, value, torch.randn(2, 2, 1, count, generator=generator)


def better(count: int) -> Tokens:
    """Return tokens that mostly displace earlier ones."""
    key, value, bias = batch_of(count, 1)
    return key, value, bias + 2


def trained() -> Tokens:
    key, value, bias = (tensor.requires_grad_() for tensor in batch_of(9))
    return key, value, bias


def part(tokens: Tokens, end: int) -> Tokens:
    key, value, bias = tokens
    return key[:, :end], value[:, :end], bias[..., :end]


class Change(NamedTuple):
    """An in-place change, and a function that builds the same state from tokens with gradients."""

    do: Callable[[KeptKeys], object]
    want: Callable[[Tokens, int], KeptKeys]
    rollback: int = 0


def followed_by(count: int) -> Callable[[Tokens, int], KeptKeys]:
    def want(tokens: Tokens, rollback: int) -> KeptKeys:
        return KeptKeys(4, rollback=rollback).updated(*tokens).updated(*better(count))

    return want


def permuted(tokens: Tokens, rollback: int) -> KeptKeys:
    key, value, bias = (tensor[PERMUTED] for tensor in tokens)
    return KeptKeys(4, rollback=rollback).updated(key, value, bias)


def later() -> KeptKeys:
    return KeptKeys(4, start=20).updated(*better(3))


CHANGES = {
    "a token": Change(lambda state: state.update(*better(1)), followed_by(1)),
    "tokens": Change(lambda state: state.update(*better(3)), followed_by(3)),
    "a token, with rollback": Change(
        lambda state: state.update(*better(1)), followed_by(1), rollback=2
    ),
    "attention of a token": Change(
        lambda state: state.attend(torch.ones(2, 1, 4, 8), *better(1), update=True),
        followed_by(1),
    ),
    "reorder": Change(lambda state: state.reorder(PERMUTED.clone()), permuted),
    "reorder, with rollback": Change(
        lambda state: state.reorder(PERMUTED.clone()), permuted, rollback=2
    ),
    "forget": Change(
        lambda state: state.forget(1),
        lambda tokens, _: KeptKeys(4, rollback=2).updated(*part(tokens, 8)),
        rollback=2,
    ),
    "merge": Change(
        lambda state: state.merge(later()),
        lambda tokens, _: KeptKeys(4).updated(*tokens).merged(later()),
    ),
    "reset": Change(lambda state: state.reset(), lambda *_: KeptKeys(4)),
}


def loss(state: KeptKeys, seed: int) -> Tensor:
    query = torch.randn(2, 2, 4, 8, generator=torch.Generator().manual_seed(seed))
    out = state.attend(query, *batch_of(2, seed))
    assert isinstance(out, Tensor)
    return out.square().sum()


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "compiled"])
@pytest.mark.parametrize("case", CHANGES)
def test_a_change_between_calls_with_gradients(case: str, mode: str) -> None:
    change = CHANGES[case]
    tokens = trained()
    want_state = change.want(tokens, change.rollback)
    state = KeptKeys(4, rollback=change.rollback).updated(*tokens)
    before, do = loss(state, 5), change.do
    if mode == "compiled":
        torch._dynamo.reset()
        do = torch.compile(do, backend="aot_eager")
    with torch.inference_mode() if mode == "inference_mode" else torch.no_grad():
        do(state)
    assert state.length == want_state.length
    got = torch.autograd.grad(before + loss(state, 6), tokens)
    then = KeptKeys(4, rollback=change.rollback).updated(*tokens)
    want = torch.autograd.grad(loss(then, 5) + loss(want_state, 6), tokens)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


def test_code_compiled_in_inference_mode_does_not_drop_gradients() -> None:
    tokens = trained()
    state, more = KeptKeys(4).updated(*tokens), better(3)
    torch._dynamo.reset()
    update = torch.compile(lambda: state.update(*more), backend="aot_eager")
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"use `torch.no_grad\(\)`"):
        update()
    assert state.length == 9
    assert all(gradient.any() for gradient in torch.autograd.grad(loss(state, 6), tokens))


def test_a_reorder_with_gradients() -> None:
    tokens = trained()
    state = KeptKeys(4).updated(*tokens)
    state.reorder(PERMUTED)
    got = torch.autograd.grad(loss(state, 6), tokens)
    want = torch.autograd.grad(loss(permuted(tokens, 0), 6), tokens)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("needs", ["state", "other", "other of an empty state"])
def test_a_merge_in_place_loses_no_gradient(needs: str) -> None:
    state, other = KeptKeys(4), later()
    if needs == "state":
        state = state.updated(*trained())
    else:
        other = KeptKeys(4, start=20).updated(*trained())
        if needs == "other":
            state.update(*batch_of(3))
    length = state.length
    with pytest.raises(ValueError, match="merged in place has no gradient"):
        state.merge(other)
    assert state.length == length
    with torch.no_grad():
        state.merge(other)
    assert state.length == other.length


def test_what_a_graph_reads_is_not_overwritten_unnoticed() -> None:
    check_overwritten("cpu")


def test_what_a_graph_reads_is_not_overwritten_by_a_kernel(triton_device: str) -> None:
    check_overwritten(triton_device)


def check_overwritten(device: str) -> None:
    """Check a trained query with constant keys: a token attends to rows that change in place."""
    state = KeptKeys(4)
    state.update(*(tensor.to(device) for tensor in batch_of(9)))
    query = torch.ones(2, 1, 4, 8, device=device, requires_grad=True)
    key, value, _ = (tensor.to(device) for tensor in better(1))
    best = torch.full((2, 2, 1, 1), 9.0, device=device)
    backend = "triton" if device == "cuda" else None  # a GPU pack takes no float32
    for mode in (torch.no_grad, torch.inference_mode):
        out = state.attend(query, key, value, best, update=True, backend=backend)
        assert isinstance(out, Tensor)
        with mode():
            state.update(key, value, best + 1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out.sum(), query)


# The layer


def with_constants(layer: DynamicMaskAttention, x: Tensor) -> Tensor:
    """Return the layer's output for x, with constant keys for tokens 9 to 11."""
    query, key, value = project_to_heads(layer, x)
    bias = layer.key_bias(value)
    query, key = normalize_and_rotate(layer, query, key, None, None, None)

    def cut(tensor: Tensor, dimension: int) -> Tensor:
        sizes = [9, 3, x.shape[1] - 12]
        before, between, after = torch.split(tensor, sizes, dimension)
        return torch.cat([before, between.detach(), after], dimension)

    out: Tensor = layer.o_proj(
        layer.attend(query, cut(key, 1), cut(value, 1), cut(bias, 3)).flatten(-2)
    )
    return out


@pytest.mark.parametrize("rollback", [0, 2])
@pytest.mark.parametrize("size", [1, 3])
@MODES
def test_a_stream_is_trained_around_calls_without_gradients(
    mode: Any, size: int, rollback: int
) -> None:
    check_stream("cpu", mode, size, rollback)


@MODES
def test_a_stream_is_trained_around_fused_steps(triton_device: str, mode: Any) -> None:
    check_stream(triton_device, mode, 1, 0)


def check_stream(device: str, mode: Any, size: int, rollback: int) -> None:
    layer, x, cache = (
        make_layer().to(device),
        states(20).to(device),
        AttentionCache(rollback=rollback),
    )
    if device == "cuda":  # its kernel pack multiplies 16-bit numbers
        layer.backend = "triton"
    loss = layer(x[:, :9], cache=cache).square().sum()
    with mode():
        for start in range(9, 12, size):
            layer(x[:, start : start + size], cache=cache)
    loss = loss + layer(x[:, 12:], cache=cache).square().sum()
    got = torch.autograd.grad(loss, list(layer.parameters()))
    whole = layer(x[:, :9]).square().sum() + with_constants(layer, x)[:, 12:].square().sum()
    want = torch.autograd.grad(whole, list(layer.parameters()))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("order", [[1, 0], [0, 0], [1]], ids=str)
def test_a_cache_is_reordered_with_gradients(order: list[int]) -> None:
    layer, x, cache, indices = make_layer(), states(20), AttentionCache(), torch.tensor(order)
    layer(x[:, :9], cache=cache)
    cache.reorder(indices)
    out = layer(x[indices][:, 9:], cache=cache)
    got = torch.autograd.grad(out.square().sum(), list(layer.parameters()))
    whole = layer(x[indices])[:, 9:]
    want = torch.autograd.grad(whole.square().sum(), list(layer.parameters()))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
