# SPDX-License-Identifier: BSD-3-Clause
"""Decoding with AttentionCache equals one pass over the whole sequence."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_dmattn import AttentionCache, DynamicMaskAttention, IntervalMask
from plain_module import make_input, make_module
from support import Target

MAKES = {
    "window": lambda: AttentionCache(),
    "growing": lambda: AttentionCache(every_key=True),
    "preallocated": lambda: AttentionCache(30, every_key=True),
}


@pytest.fixture(autouse=True)
def no_grad():  # type: ignore[no-untyped-def]
    with torch.no_grad():
        yield


def decode(
    module: DynamicMaskAttention,
    x: Tensor,
    cache: AttentionCache,
    chunks: list[int],
    mask: Tensor | None = None,
) -> Tensor:
    outs, start = [], 0
    for count in chunks:
        end = start + count
        outs.append(module(x[:, start:end], None if mask is None else mask[:, :end], cache=cache))
        start = end
    return torch.cat(outs, 1)


def assert_same(got: Tensor, want: Tensor) -> None:
    tolerance = 3e-2 if got.dtype != torch.float32 else 1e-5
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("chunks", [[12, *[1] * 18], [1] * 30, [5, 0, 11, 1, 13], [30]], ids=len)
def test_prefill_and_decode_equal_one_pass(
    chunks: list[int], make: type[AttentionCache], target: Target
) -> None:
    for settings in (
        {},
        {"window_size": None},
        {"window_size": 12, "bias_form": "exp", "sink": True},
    ):
        module = make_module(target, **settings)
        x = make_input(module, 2, 30)
        cache = make()
        assert_same(decode(module, x, cache, chunks), module(x))
        assert cache.length == 30


def test_padded_sequences_decode(target: Target) -> None:
    module = make_module(target)
    x = make_input(module, 3, 20)
    mask = torch.arange(20, device=x.device) >= torch.tensor([[0], [4], [11]], device=x.device)
    got = decode(module, x, AttentionCache(), [12, *[1] * 8], mask)
    assert_same(got, module(x, mask))


def test_reorder_follows_the_sequences(target: Target) -> None:
    module = make_module(target)
    x = make_input(module, 3, 14)
    cache = AttentionCache()
    decode(module, x[:, :9], cache, [9])
    beams = torch.tensor([2, 0, 0, 1], device=x.device)
    cache.reorder(beams)
    rest = make_input(module, 4, 5, seed=8)
    whole = torch.cat([x[beams, :9], rest], 1)
    assert_same(decode(module, rest, cache, [1] * 5), module(whole)[:, 9:])
    cache.reorder(torch.tensor([3]))
    assert_same(
        module(rest[3:, :1], cache=cache)[:, 0],
        module(torch.cat([whole[3:], rest[3:, :1]], 1))[:, -1],
    )


def test_truncate_takes_tokens_back(target: Target) -> None:
    module = make_module(target)
    x = make_input(module, 2, 14)
    for cache in (AttentionCache(14, rollback=4), AttentionCache(14, every_key=True)):
        decode(module, x[:, :8], cache, [8])
        module(make_input(module, 2, 4, seed=7), cache=cache)  # rejected drafts
        cache.truncate(8)
        assert cache.length == 8
        assert_same(decode(module, x[:, 8:], cache, [1] * 6), module(x)[:, 8:])
        cache.truncate(0)
        assert_same(decode(module, x, cache, [14]), module(x))


def test_what_is_forgotten_is_not_taken_back() -> None:
    module = make_module(Target("cpu", "cpu"))
    for rollback, least in ((0, 9), (3, 6)):
        cache = AttentionCache(rollback=rollback)
        decode(module, make_input(module, 2, 9), cache, [8, 1])
        text = rf"0 or at least {least}, .*AttentionCache\(rollback={rollback}\) can .*, got 5"
        with pytest.raises(ValueError, match=text):
            cache.truncate(5)
        assert cache.length == 9


def test_copies_are_independent(target: Target) -> None:
    module = make_module(target)
    x = make_input(module, 1, 9)
    cache = AttentionCache()
    module(x[:, :8], cache=cache)
    other = copy.deepcopy(cache)
    module(make_input(module, 1, 3, seed=5), cache=other)
    assert (cache.length, other.length) == (8, 11)
    assert_same(module(x[:, 8:], cache=cache), module(x)[:, 8:])


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_inference_mode_may_be_left(make: type[AttentionCache], target: Target) -> None:
    module = make_module(target)
    x = make_input(module, 2, 20)
    cache = make()
    with torch.inference_mode():
        outs = [module(x[:, :9], cache=cache), module(x[:, 9:10], cache=cache)]
    outs += [module(x[:, i : i + 1], cache=cache) for i in range(10, 15)]
    with torch.inference_mode():
        outs.append(module(x[:, 15:], cache=cache))
        assert_same(torch.cat(outs, 1), module(x))


@pytest.mark.parametrize(
    "mode", [torch.no_grad, pytest.param(torch.inference_mode, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_compiled_decoding(make: type[AttentionCache], mode: Any, target: Target) -> None:
    """The prompt, then single tokens until the cache has grown, with padding."""
    module = make_module(target)
    x = make_input(module, 2, 16)
    padding = torch.arange(16, device=x.device) >= torch.tensor([[0], [3]], device=x.device)
    for mask in (None, padding):
        torch._dynamo.reset()
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        with mode():
            got = decode(compiled, x, make(), [6, *[1] * 10], mask)
            assert_same(got, module(x, mask))


def test_a_prompt_in_inference_mode_and_compiled_steps_outside(target: Target) -> None:
    module = make_module(target)
    x = make_input(module, 2, 12)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for make in MAKES.values():
        cache = make()
        with torch.inference_mode():
            outs = [module(x[:, :9], cache=cache)]
            cache.reorder(torch.arange(2))
        outs += [compiled(x[:, i : i + 1], cache=cache) for i in range(9, 12)]
        assert_same(torch.cat(outs, 1), module(x))


@pytest.mark.parametrize(
    ("shape", "is_interval"),
    [
        *(((*sizes,), False) for sizes in ((2, 1), (1, 1), (2, 1, 1), (2, 1, 1, 1), (2, 8))),
        ((1, 1, 1), True),
    ],
)
def test_masks_have_the_keys_of_the_cache(shape: tuple[int, ...], is_interval: bool) -> None:
    """A mask for the new token alone would be broadcast to all keys; the call appends nothing."""
    module = make_module(Target("cpu", "cpu"))
    x = make_input(module, 2, 9)
    cache = AttentionCache()
    module(x[:, :8], cache=cache)
    mask = torch.ones(shape, dtype=torch.bool)
    given = IntervalMask(*[mask.to(torch.int32)] * 2) if is_interval else mask
    text = "attn_mask must have all 9 keys .* those of 1 tokens after the 8 that cache holds, got"
    with pytest.raises(ValueError, match=text):
        module(x[:, 8:], given, cache=cache)
    assert cache.length == 8


def tokens(count: int, *, batch: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = (batch, count, 2, 6), (batch, count, 2, 6), (batch, 2, 1, count)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def test_memory_is_allocated_once_or_doubled() -> None:
    fixed, growing = AttentionCache(100), AttentionCache()
    capacities = []
    for step in range(50):
        for cache in (fixed, growing):
            cache.append(*tokens(2 if step else 4))
        capacities.append(growing.capacity)
        assert fixed.capacity == 100 or step > 47
        if step == 47:
            break
    assert growing.length == fixed.length == 98
    assert sorted(set(capacities)) == [4, 8, 16, 32, 64, 128]
    assert AttentionCache().capacity == 0


def test_append_returns_all_in_order_and_leaves_earlier_views() -> None:
    parts = [tokens(n) for n in (3, 1, 5)]
    cache = AttentionCache()
    earlier = []
    for part in parts:
        got = cache.append(*part)
        earlier.append([(view, view.clone()) for view in got])
    for index, dimension in enumerate((1, 1, 3)):
        assert torch.equal(got[index], torch.cat([part[index] for part in parts], dimension))
    assert all(torch.equal(view, then) for views in earlier for view, then in views)


def test_repr_says_how_full_it_is() -> None:
    cache = AttentionCache(16)
    cache.append(*tokens(3))
    assert repr(cache) == "AttentionCache(length=3, capacity=16, max_length=16)"


def test_wrong_arguments_are_explained() -> None:
    with pytest.raises(ValueError, match="max_length must be at least 1, or None to grow, got 0"):
        AttentionCache(0)
    with pytest.raises(TypeError, match=r"max_length must be an integer, got 2\.5"):
        AttentionCache(2.5)  # type: ignore[arg-type]
    cache = AttentionCache(8)
    cache.append(*tokens(6))
    for wrong, text in (
        (tokens(3), "max_length=8 and holds 6 tokens; 3 more do not fit"),
        (tokens(1, batch=3), r"holds key of shape \[2, 1, 2, 6\] but for N, got \[3, 1, 2, 6\]"),
        (tokens(1, dtype=torch.float16), "key must be torch.float32 on cpu, .* got torch.float16"),
    ):
        with pytest.raises(ValueError, match=text):
            cache.append(*wrong)
    for length in (-1, 7):
        with pytest.raises(ValueError, match=f"length must be from 0 to 6, got {length}"):
            cache.truncate(length)
    with pytest.raises(ValueError, match=r"indices must have shape \(B,\), got \(1, 2\)"):
        cache.reorder(torch.tensor([[0, 1]]))
    assert cache.length == 6


def test_memory_is_that_of_the_window(target: Target) -> None:
    module = make_module(target)
    cache = AttentionCache()
    x = make_input(module, 2, 40)
    decode(module, x[:, :10], cache, [9, 1])
    assert cache.kept is not None
    addresses = [tensor.data_ptr() for tensor in cache.kept._kept or ()]
    decode(module, x[:, 10:], cache, [1, 9, *[1] * 20])
    assert [tensor.data_ptr() for tensor in cache.kept._kept or ()] == addresses
    assert (cache.capacity, cache.length) == (5, 40)


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("settings", [{}, {"window_size": None}], ids=str)
def test_padding_is_given_for_new_tokens(make: type[AttentionCache], settings: Any) -> None:
    """The padding is alone, beside a mask of all keys, or without a cache."""
    module = make_module(Target("cpu", "cpu"), **settings)
    x = make_input(module, 3, 20)
    padding = torch.arange(20) >= torch.tensor([[0], [4], [11]])
    want = module(x, padding)
    assert_same(module(x, padding=padding), want)
    cache, outs, every = make(), [], torch.ones(3, 20, dtype=torch.bool)
    for start, end in ((0, 12), (12, 12), (12, 13), (13, 20)):
        mask = every[:, :end] if start else None
        outs.append(module(x[:, start:end], mask, cache=cache, padding=padding[:, start:end]))
    assert_same(torch.cat(outs, 1), want)
    with pytest.raises(ValueError, match=r"padding must have shape \(3, 20\), of the tokens of"):
        module(x, padding=padding[:, :19])
    with pytest.raises(TypeError, match=r"padding must have dtype torch\.bool"):
        module(x, padding=padding.float())


def test_masks_that_change_need_every_key() -> None:
    module = make_module(Target("cpu", "cpu"))
    x = make_input(module, 2, 12)
    rows = torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(3)) < 0.7
    want = module(x, rows)
    for cache in (AttentionCache(), AttentionCache(every_key=True)):
        first = module(x[:, :8], rows[:, :, :8, :8], cache=cache)
        assert_same(torch.cat([first, module(x[:, 8:], rows[:, :, 8:], cache=cache)], 1), want)
        assert cache.kept is None
    cache = AttentionCache()
    module(x[:, :8], cache=cache)
    with pytest.raises(
        ValueError, match=r"forgotten: use AttentionCache\(every_key=True\) with it"
    ):
        module(x[:, 8:], rows[:, :, 8:], cache=cache)
    with pytest.raises(
        ValueError, match="window_size must be 5, whose keys the cache keeps, got 4"
    ):
        cache.append(*(torch.randn(2, 1, 2, 6),) * 2, torch.randn(2, 2, 1, 1), window_size=4)


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_caches_are_pickled(make: type[AttentionCache]) -> None:
    module = make_module(Target("cpu", "cpu"))
    x = make_input(module, 1, 9)
    cache = make()
    module(x[:, :8], cache=cache)
    other = pickle.loads(pickle.dumps(cache))
    module(x[:, 8:], cache=cache)
    assert other.length == 8
    assert_same(module(x[:, 8:], cache=other), module(x)[:, 8:])


def test_pickles_of_the_first_release_are_read() -> None:
    old = {"length": 3, "max_length": 16, "_buffers": {}}
    cache = AttentionCache()
    cache.append(*tokens(3))
    old["_buffers"] = cache._buffers
    other = AttentionCache.__new__(AttentionCache)
    other.__setstate__(old)
    assert (other.length, other.max_length, other.capacity) == (3, 16, 3)
    assert len(other.append(*tokens(1))[0][0]) == 4


def test_a_stream_is_trained_in_chunks(target: Target) -> None:
    """The gradients equal those of one pass; `detach` limits them to a chunk."""
    module = make_module(target, dtype=torch.float32) if target.device == "cpu" else None
    if module is None:
        pytest.skip("kernels of GPUs do not compute in float32")
    x = make_input(module, 2, 30)
    with torch.enable_grad():
        parameters = list(module.parameters())
        want = torch.autograd.grad(module(x).square().sum(), parameters)
        cache, loss = AttentionCache(), torch.zeros(())
        for start, end in ((0, 11), (11, 12), (12, 30)):
            loss = loss + module(x[:, start:end], cache=cache).square().sum()
        got = torch.autograd.grad(loss, parameters)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
        cache.detach()
        assert cache.kept is not None
        assert not any(tensor.requires_grad for tensor in cache.kept.tensors.values())
    assert_same(module(x[:, :3], cache=cache), module(torch.cat([x, x[:, :3]], 1))[:, 30:])


def test_a_compiled_stream_is_trained_in_chunks() -> None:
    module = make_module(Target("cpu", "cpu"), dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, parameters, got = make_input(module, 2, 21), list(module.parameters()), []
    with torch.enable_grad():
        for call in (module, compiled):
            cache, loss = AttentionCache(), torch.zeros(())
            for start, end in ((0, 11), (11, 12), (12, 21)):
                loss = loss + call(x[:, start:end], cache=cache).square().sum()
            got.append(torch.autograd.grad(loss, parameters))
            assert cache.length == 21
    for one, other in zip(*got, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_gradients_are_refused_without_a_window() -> None:
    module = DynamicMaskAttention(24, 4, window_size=None)
    with torch.enable_grad(), pytest.raises(ValueError, match=r"call under torch\.no_grad\(\)"):
        module(torch.randn(1, 3, 24), cache=AttentionCache())
