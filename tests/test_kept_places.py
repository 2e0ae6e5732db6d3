# SPDX-License-Identifier: BSD-3-Clause
"""States and caches that also keep the last and the first tokens."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_dmattn import (
    AttentionCache,
    DynamicMaskAttention,
    IntervalMask,
    KeptKeys,
    flash_dmattn_func,
)
from states import make_layer, states
from support import Target, rand_bool
from test_kept_keys import EXACT, PACK, Stream, assert_same, in_chunks, make_stream

Counts = tuple[int, int, int]


def whole(stream: Stream, counts: Counts, backend: str = "reference", **options: Any) -> Tensor:
    query, key, value, bias, padding = stream
    window, last, first = counts
    out = flash_dmattn_func(
        query, key, value, padding, bias, is_causal=True, window_size=window, keep_last=last,
        keep_first=first, backend=backend, **options,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def make_state(counts: Counts, **options: Any) -> KeptKeys:
    return KeptKeys(counts[0], keep_last=counts[1], keep_first=counts[2], **options)


def draw_stream(draw: Any, length: int, dtype: torch.dtype = torch.float64) -> Stream:
    kv_heads = draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 3))
    return make_stream(
        length,
        heads=heads,
        kv_heads=kv_heads,
        bias_heads=draw(st.sampled_from([1, kv_heads, heads])),
        dim=4,
        levels=draw(st.sampled_from([2, 5, 100])),
        padded=draw(st.booleans()),
        dtype=dtype,
        seed=draw(st.integers(0, 1000)),
    )


def draw_counts(draw: Any) -> Counts:
    counts = (
        draw(st.sampled_from([0, 1, 3, 8, 30])),
        draw(st.sampled_from([0, 1, 2, 5, 20])),
        draw(st.sampled_from([0, 0, 1, 3, 20])),
    )
    return counts if any(counts) else (0, 2, 1)


def draw_chunks(draw: Any, length: int) -> list[int]:
    chunks: list[int] = []
    while sum(chunks) < length:
        count = draw(st.sampled_from([1, 1, 1, 2, 4, 9, 20]))
        chunks.append(min(count, length - sum(chunks)))
    return chunks


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_chunks_equal_the_whole(data: st.DataObject) -> None:
    stream, counts = draw_stream(data.draw, 40), draw_counts(data.draw)
    state = make_state(counts, rollback=data.draw(st.sampled_from([0, 0, 1, 4])))
    got = in_chunks(stream, 0, draw_chunks(data.draw, 40), state, backend="reference")
    assert_same(got, whole(stream, counts))
    assert state.length == 40
    sharing = stream.bias.shape[1] // (1 if stream.bias.shape[1] == 1 else stream.key.shape[2])
    assert state.capacity == counts[0] * sharing + counts[1] + counts[2] + state.rollback


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_tokens_are_taken_back(data: st.DataObject) -> None:
    """Tokens that are taken back leave no trace; different tokens follow."""
    draw = data.draw
    counts, rollback, length = draw_counts(draw), draw(st.integers(1, 6)), 40
    state, outs, start = make_state(counts, rollback=rollback), [], 0
    stream, other = (draw_stream(draw, length)._replace(padding=None) for _ in range(2))
    while [t.shape for t in other[:4]] != [t.shape for t in stream[:4]]:
        other = draw_stream(draw, length)._replace(padding=None)
    while start < length:
        count = min(draw(st.sampled_from([1, 1, 2, 7])), length - start)
        drafts = draw(st.integers(0, rollback))
        if 0 < drafts <= length - start:
            state.attend(*other.part(start, start + drafts), update=True, backend="reference")
            state.forget(drafts)
        part = stream.part(start, start + count)
        outs.append(state.attend(*part, update=True, backend="reference"))
        start += count
    assert_same(torch.cat(outs, 1), whole(stream, counts))


@pytest.mark.parametrize("bias_heads", [1, 2, 4])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_states_of_parts_merge(order: tuple[int, ...], bias_heads: int) -> None:
    counts = (4, 5, 3)
    stream = make_stream(50, bias_heads=bias_heads)
    parts = [(0, 9), (9, 20), (20, 40)]
    states = []
    for start, end in parts:
        state = make_state(counts, start=start)
        _, key, value, bias, padding = stream.part(start, end)
        state.update(key, value, bias, padding, backend="reference")
        states.append(state)
    merged = states[order[0]].clone()
    for number in order[1:]:
        merged.merge(states[number], backend="reference")
    got = merged.attend(*stream.part(40, 50), backend="reference")
    assert_same(got, whole(stream, counts)[:, 40:])


@pytest.mark.parametrize("name", ["window_size", "keep_last", "keep_first"])
def test_states_of_other_numbers_do_not_merge(name: str) -> None:
    numbers = {"window_size": 3, "keep_last": 2, "keep_first": 1}
    other = {**numbers, name: 7}
    with pytest.raises(ValueError, match=f"other must have {name}={numbers[name]}, got 7"):
        KeptKeys(**numbers).merge(KeptKeys(**other))


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("target", [EXACT, PACK], ids=str)
def test_copies_and_saved_states_go_on(chunk: int, target: Target) -> None:
    counts = (4, 5, 3)
    dtype = torch.float64 if target == EXACT else torch.float32
    stream = make_stream(40, padded=True, dtype=dtype)
    want = whole(stream, counts, target.backend)
    state = make_state(counts)
    in_chunks(stream.part(0, 21), 0, [6, *[1] * 15], state, backend=target.backend)
    loaded = make_state(counts)
    loaded.load_state_dict(state.state_dict())
    for other in (state.clone(), copy.deepcopy(state), pickle.loads(pickle.dumps(state)), loaded):
        for start in range(21, 40, chunk):
            part = stream.part(start, min(40, start + chunk))
            out = other.attend(*part, update=True, backend=target.backend)
            assert_same(out, want[:, start : start + chunk])


def test_sequences_are_reordered() -> None:
    counts, stream = (3, 4, 2), make_stream(30)
    state = make_state(counts)
    in_chunks(stream.part(0, 20), 0, [10, *[1] * 10], state, backend="reference")
    state.reorder(torch.tensor([1, 1]))
    twice = Stream(*(t[[1, 1]] for t in stream[:4]))
    got = in_chunks(twice.part(20, 30), 0, [1] * 10, state, backend="reference")
    assert_same(got, whole(twice, counts)[:, 20:])


def test_states_of_earlier_versions_keep_no_places() -> None:
    stream = make_stream(20)
    state = KeptKeys(4)
    in_chunks(stream.part(0, 9), 4, [9], state, backend="reference")
    saved = state.state_dict()
    for name in ("keep_last", "keep_first"):
        assert saved.pop(name) == 0
    loaded = KeptKeys(4)
    loaded.load_state_dict(saved)
    assert (loaded.keep_last, loaded.keep_first) == (0, 0)
    got = loaded.attend(*stream.part(9, 20), backend="reference")
    assert_same(got, whole(stream, (4, 0, 0))[:, 9:])
    with pytest.raises(ValueError, match="state must have keep_last=2, as this KeptKeys, got 0"):
        KeptKeys(4, keep_last=2).load_state_dict(saved)
    pickled = state.__getstate__()
    for name in ("keep_last", "keep_first"):
        del pickled[name]
    older = KeptKeys.__new__(KeptKeys)
    older.__setstate__(pickled)
    assert older.counts == (4, 0, 0)
    assert_same(older.attend(*stream.part(9, 20), backend="reference"), got)


def test_gradients_flow_to_what_is_kept_for_its_place() -> None:
    counts, stream = (3, 4, 2), make_stream(24, levels=100)
    stream.bias.nan_to_num_(0.0, 0.0, 0.0)
    tensors = [t.clone().requires_grad_() for t in stream[:4]]
    want = torch.autograd.grad(whole(Stream(*tensors), counts).square().sum(), tensors)
    state, loss, start = make_state(counts), torch.zeros(()), 0
    for count in (5, 1, 7, 1, 10):
        query, key, value, bias, _ = Stream(*tensors).part(start, start + count)
        out = state.attend(query, key, value, bias, backend="reference")
        loss = loss + out.square().sum()
        state = state.updated(key, value, bias, backend="reference")
        start += count
    for got, expected in zip(torch.autograd.grad(loss, tensors), want, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-10, rtol=1e-10)


def test_what_update_returns_is_attended_to_with_its_tokens() -> None:
    counts, stream = (3, 4, 2), make_stream(30, padded=True)
    state, outs = make_state(counts), []
    for start in range(0, 30, 5):
        query, *tokens = stream.part(start, start + 5)
        key, value, bias = state.update(*tokens, backend="reference")
        options = {"window_size": 3, "keep_last": 4, "keep_first": 2, "backend": "reference"}
        seen = state.seen(bias)
        outs.append(flash_dmattn_func(query, key, value, seen, bias, is_causal=True, **options))
    assert_same(torch.cat(outs, 1), whole(stream, counts))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"window_size": 0}, ValueError, "window_size must be at least 1, got 0"),
        ({"window_size": -1, "keep_last": 2}, ValueError, "window_size must be at least 0"),
        ({"window_size": 2, "keep_last": -1}, ValueError, "keep_last must be at least 0, got -1"),
        ({"window_size": 2, "keep_first": True}, TypeError, "keep_first must be an integer"),
    ],
)
def test_wrong_numbers(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        KeptKeys(**arguments)


PLACES = {"window_size": 5, "keep_last": 4, "keep_first": 2}


def padded_on_the_left(length: int) -> Tensor:
    return torch.arange(length) >= torch.tensor([[7], [0]])


def decoded(
    layer: DynamicMaskAttention, x: Tensor, cache: AttentionCache, chunks: list[int], padded: bool
) -> Tensor:
    outs, start, padding = [], 0, padded_on_the_left(x.shape[1]) if padded else None
    for count in chunks:
        new = None if padding is None else padding[:, start : start + count]
        outs.append(layer(x[:, start : start + count], cache=cache, padding=new))
        start += count
    return torch.cat(outs, 1)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("chunks", [[12, *[1] * 18], [1] * 30, [4, 1, 9, 1, 15]], ids=len)
@pytest.mark.parametrize("make", [AttentionCache, lambda: AttentionCache(rollback=3),
                                  lambda: AttentionCache(every_key=True)])  # fmt: skip
def test_a_layer_decodes(make: Any, chunks: list[int], padded: bool) -> None:
    layer, x = make_layer(**PLACES), states(30)
    padding = padded_on_the_left(30) if padded else None
    with torch.no_grad():
        want = layer(x, padding)
        torch.testing.assert_close(layer(x, padding=padding), want)
        cache = make()
        got = decoded(layer, x, cache, chunks, padded)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    if cache.kept is not None:
        assert cache.capacity == 11 + cache.rollback
        assert cache.kept.counts == (5, 4, 2)


@pytest.mark.parametrize("heads", [None, 1, 2, 4])
def test_a_layer_with_padding_beside_a_mask(heads: int | None) -> None:
    """The mask has one head, one for each KV head, or one for each head; None: intervals."""
    layer, x = make_layer(**PLACES), states(30)
    padding = padded_on_the_left(30)
    band = IntervalMask.sliding_window(17, 0, 30, 30)
    mask = band.to_bool(30) if heads is None else rand_bool(2, heads, 30, 30)
    given = band if heads is None else mask
    with torch.no_grad():
        want = layer(x, mask & padding[:, None, None])
        got = layer(x, given, padding=padding)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        cache, outs = AttentionCache(every_key=True), []
        for part in (slice(0, 14), slice(14, 15), slice(15, 30)):
            seen = mask[:, :, part, : part.stop]
            outs.append(layer(x[:, part], seen, cache=cache, padding=padding[:, part]))
    torch.testing.assert_close(torch.cat(outs, 1), want, atol=1e-5, rtol=1e-5)


def test_a_layer_with_padding_beside_a_wrong_mask() -> None:
    layer, x, padding = make_layer(**PLACES), states(30), padded_on_the_left(30)
    for shape in ((2, 3, 1, 30), (3, 1, 1, 30)):
        mask = torch.ones(shape, dtype=torch.bool)
        with pytest.raises(ValueError, match=rf"attn_mask has shape \({shape[0]}, {shape[1]}, "):
            layer(x, mask, padding=padding)


def test_a_layer_is_what_its_arguments_are() -> None:
    layer, x = make_layer(**PLACES), states(30)
    plain = make_layer(window_size=5)
    assert not torch.allclose(layer(x), plain(x))
    layer.keep_last = layer.keep_first = 0
    assert torch.equal(layer(x), plain(x))
    assert "window_size=5, keep_last=4, keep_first=2" in repr(make_layer(**PLACES))
    older = pickle.loads(pickle.dumps(plain))
    del older.__dict__["keep_last"], older.__dict__["keep_first"]
    assert torch.equal(older(x), plain(x))


def test_a_layer_with_packed_sequences() -> None:
    layer, x = make_layer(**PLACES), states(30)
    cu_seqlens = torch.tensor([0, 11, 30], dtype=torch.int32)
    got = layer(x[0], cu_seqlens=cu_seqlens)
    want = torch.cat([layer(x[:1, :11]), layer(x[:1, 11:])], 1)[0]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_a_layer_with_a_window_of_places_alone() -> None:
    layer, x = make_layer(window_size=0, keep_last=6), states(30)
    cache = AttentionCache()
    with torch.no_grad():
        got = decoded(layer, x, cache, [5, *[1] * 25], padded=False)
        torch.testing.assert_close(got, layer(x), atol=1e-5, rtol=1e-5)
    assert cache.capacity == 6


@pytest.mark.parametrize("padded", [False, True])
def test_gradients_through_a_cache(padded: bool) -> None:
    layer, x = make_layer(**PLACES), states(30)
    parameters = list(layer.parameters())
    want = torch.autograd.grad(
        layer(x, padded_on_the_left(30) if padded else None).square().sum(), parameters
    )
    out = decoded(layer, x, AttentionCache(), [8, 1, 10, 11], padded)
    got = torch.autograd.grad(out.square().sum(), parameters)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_caches_are_saved_and_taken_back() -> None:
    layer, x = make_layer(**PLACES), states(30)
    with torch.no_grad():
        want, cache = layer(x), AttentionCache(rollback=3)
        layer(x[:, :10], cache=cache)
        layer(states(3, seed=4), cache=cache)
        cache.truncate(10)
        loaded = AttentionCache(rollback=3)
        loaded.load_state_dict(cache.state_dict())
        for each in (cache, loaded):
            got = torch.cat([layer(x[:, i : i + 2], cache=each) for i in range(10, 30, 2)], 1)
            torch.testing.assert_close(got, want[:, 10:], atol=1e-5, rtol=1e-5)
        with pytest.raises(ValueError, match="keep_last must be 4, whose keys the cache keeps"):
            make_layer(window_size=5, keep_last=3, keep_first=2)(x[:, :1], cache=cache)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window_size": 0}, "window_size must be at least 1, got 0"),
        ({"window_size": None, "keep_last": 2}, "keep_last must be 0 without window_size, got 2"),
        ({"window_size": 3, "keep_first": -2}, "keep_first must be at least 0, got -2"),
        ({"keep_last": 2, "is_causal": False}, "keep_last must be 0 with is_causal=False, got 2"),
    ],
)
def test_wrong_layers(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DynamicMaskAttention(16, 2, **settings)


def test_a_cache_is_told_of_places() -> None:
    key, value = torch.randn(2, 1, 9, 2, 8)
    bias = torch.randn(1, 2, 1, 9)
    cache = AttentionCache()
    cache.append(key, value, bias, window_size=3, keep_last=2, keep_first=1)
    assert cache.kept is not None
    assert cache.kept.counts == (3, 2, 1)
    with pytest.raises(ValueError, match="keep_last must be 2, whose keys the cache keeps, got 0"):
        cache.append(key, value, bias, window_size=3)
    with pytest.raises(ValueError, match="keep_last must be 0 without window_size, got 2"):
        AttentionCache().append(key, value, bias, keep_last=2)
