# SPDX-License-Identifier: BSD-3-Clause
"""KeptKeys gives the results of attention over all keys, in any chunks."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from flash_dmattn import IntervalMask, KeptKeys, flash_dmattn_func
from support import Target

EXACT = Target("cpu", "reference")
PACK = Target("cpu", "cpu")


class Stream(NamedTuple):
    """A sequence, and the tensors that determine its visible keys."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor
    padding: Tensor | None = None

    def part(self, start: int, end: int) -> Stream:
        padding = None if self.padding is None else self.padding[:, start:end]
        rows = (t[:, start:end] for t in self[:3])
        return Stream(*rows, self.bias[..., start:end], padding)

    @property
    def length(self) -> int:
        return self.query.shape[1]


def make_stream(
    length: int = 60,
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    bias_heads: int = 2,
    dim: int = 8,
    levels: int = 5,
    padded: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Stream:
    """Return a stream whose biases have few distinct values, so that most choices are ties."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    bias = torch.randint(0, levels, (batch, bias_heads, 1, length), generator=generator).to(dtype)
    bias = bias / 2 - 1
    for value in (-torch.inf, torch.nan):
        bias[torch.rand(bias.shape, generator=generator) < 0.1] = value
    padding = None
    if padded:
        padding = torch.rand(batch, length, generator=generator) < 0.7
    tensors = (
        normal(batch, length, heads, dim),
        *(normal(batch, length, kv_heads, dim) for _ in range(2)),
    )
    return Stream(*tensors, bias, padding)


def whole(stream: Stream, window: int, backend: str = "reference", **options: Any) -> Tensor:
    query, key, value, bias, padding = stream
    out = flash_dmattn_func(
        query, key, value, padding, bias, is_causal=True, window_size=window, backend=backend,
        **options,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def in_chunks(
    stream: Stream, window: int, chunks: list[int], state: KeptKeys | None = None, **options: Any
) -> Tensor:
    state = KeptKeys(window) if state is None else state
    outs, start = [], 0
    for count in chunks:
        part = stream.part(start, start + count)
        outs.append(state.attend(*part, update=True, **options))
        start += count
    return torch.cat(outs, 1)


def assert_same(got: Tensor, want: Tensor) -> None:
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(got.dtype, 3e-2)
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_chunks_equal_the_whole(data: st.DataObject) -> None:
    draw = data.draw
    kv_heads = draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 3))
    stream = make_stream(
        batch=draw(st.integers(1, 2)),
        heads=heads,
        kv_heads=kv_heads,
        bias_heads=draw(st.sampled_from([1, kv_heads, heads])),
        levels=draw(st.sampled_from([1, 3, 1000])),
        padded=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )
    window = draw(st.integers(1, 12))
    options = {
        "softcap": draw(st.sampled_from([None, 2.0])),
        "softmax_scale": draw(st.sampled_from([None, 0.3])),
        "sink": draw(st.sampled_from([None, torch.linspace(-1, 2, heads)])),
    }
    cuts = sorted(draw(st.lists(st.integers(0, stream.length), max_size=5)))
    bounds = [0, *cuts, stream.length]
    chunks = [b - a for a, b in itertools.pairwise(bounds)]
    if draw(st.booleans()):
        chunks = [c for chunk in chunks for c in ([1] * chunk if chunk < 20 else [chunk])]
    state = KeptKeys(window, rollback=draw(st.sampled_from([0, 0, 1, 5])))
    got = in_chunks(stream, window, chunks, state, backend="reference", **options)
    assert_same(got, whole(stream, window, **options))
    assert state.length == stream.length


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias_heads", [1, 2, 4])
def test_the_pack_gives_the_same(bias_heads: int, dtype: torch.dtype) -> None:
    stream = make_stream(100, bias_heads=bias_heads, padded=True, dtype=dtype)
    for chunks in ([50, 50], [30, *[1] * 70], [100], [1] * 100):
        assert_same(in_chunks(stream, 9, chunks), whole(stream, 9, "cpu"))


def test_dropped_and_padded_keys_reach_nothing() -> None:
    stream = make_stream(80, padded=True, dtype=torch.float32)
    clean = in_chunks(stream, 6, [20, 1, 1, 30, 28])
    assert stream.padding is not None
    unseen = ~stream.padding[:, :, None] | stream.bias[:, :, 0].transpose(1, 2).isneginf()
    unseen |= stream.bias[:, :, 0].transpose(1, 2).isnan()
    for tensor in (stream.key, stream.value):
        tensor[unseen] = torch.nan
    assert torch.equal(in_chunks(stream, 6, [20, 1, 1, 30, 28]), clean)


def test_a_tie_is_the_earlier_tokens_whatever_slot_it_lies_in() -> None:
    """A later token in an earlier slot must not win a tie against an earlier token."""
    bias = torch.tensor([0.0, 1, 1, 2, 1, 3, 1]).view(1, 1, 1, -1)
    key = torch.zeros(1, 7, 1, 2)
    value = torch.arange(7.0).view(1, 7, 1, 1).expand(1, 7, 1, 2)
    stream = Stream(key, key, value, bias)
    state = KeptKeys(3)
    in_chunks(stream, 3, [1] * 4, state)  # token 3 takes the slot of token 0
    state.update(*stream.part(4, 7)[1:4])
    assert sorted(state.tensors["position"].flatten().tolist()) == [1, 3, 5]
    assert_same(in_chunks(stream, 3, [4, 1, 2]), whole(stream, 3, "cpu"))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_states_merge_in_any_order(order: tuple[int, ...]) -> None:
    stream = make_stream(60, bias_heads=4, padded=True)
    query, tail = stream.part(45, 60)[0], stream.part(45, 60)
    states = []
    for start in (0, 15, 30):
        state = KeptKeys(4, start=start)
        part = stream.part(start, start + 15)
        for step in range(15):
            state.update(*part.part(step, step + 1)[1:], backend="reference")
        states.append(state)
    merged, *others = (states[i] for i in order)
    for other in others:
        merged.merge(other, backend="reference")
    assert merged.length == 45
    got = merged.attend(query, *tail[1:], backend="reference")
    assert isinstance(got, Tensor)
    assert_same(got, whole(stream, 4)[:, 45:])


@pytest.mark.parametrize("bias_heads", [1, 2, 4])
def test_gradients_are_those_of_the_whole(bias_heads: int) -> None:
    stream = make_stream(50, bias_heads=bias_heads, padded=True)
    leaves = [t.clone().requires_grad_() for t in stream[:4]]
    tracked = Stream(*leaves, stream.padding)
    dout = torch.randn_like(stream.query)
    want = torch.autograd.grad(whole(tracked, 5), leaves, dout)
    state, outs = KeptKeys(5), []
    for start, end in ((0, 20), (20, 21), (21, 21), (21, 50)):
        part = tracked.part(start, end)
        outs.append(state.attend(*part, backend="reference"))
        state = state.updated(*part[1:], backend="reference")
    got = torch.autograd.grad(torch.cat(outs, 1), leaves, dout)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def test_detach_cuts_gradients_off() -> None:
    stream = make_stream(30)
    leaves = [t.clone().requires_grad_() for t in stream[:4]]
    tracked = Stream(*leaves)
    with pytest.raises(ValueError, match=r"call under torch\.no_grad\(\), or use updated\(\)"):
        KeptKeys(5).update(*tracked.part(0, 20)[1:4], backend="reference")
    state = KeptKeys(5).updated(*tracked.part(0, 20)[1:4], backend="reference").detach()
    assert not any(tensor.requires_grad for tensor in state.tensors.values())
    out = state.attend(*tracked.part(20, 30)[:4], backend="reference")
    (gradient,) = torch.autograd.grad(out.sum(), leaves[1])
    assert not gradient[:, :20].any()
    assert gradient[:, 20:].any()


def test_states_share_no_memory() -> None:
    """In-place changes of a state do not change its copies, and vice versa."""
    stream = make_stream(30)
    state = KeptKeys(5, start=3)
    in_chunks(stream, 5, [10, 1], state, backend="reference")
    copies = [state.detach(), state.clone(), KeptKeys(5).merged(state), state.merged(KeptKeys(5))]
    held = {name: tensor.clone() for name, tensor in state.tensors.items()}
    in_chunks(stream.part(11, 20), 5, [1] * 9, state, backend="reference")
    for other in copies:
        assert other.length == 14
        assert all(torch.equal(other.tensors[name], tensor) for name, tensor in held.items())
        other.reset()
        assert other.length == 3
    assert state.length == 23


def test_a_state_of_training_is_reset() -> None:
    leaves = [t.clone().requires_grad_() for t in make_stream(20)[1:4]]
    state = KeptKeys(5).updated(*leaves, backend="reference")
    kept = state.tensors["key"]
    state.reset()
    assert state.length == 0
    kept.sum().backward()  # earlier results keep their gradients
    assert leaves[0].grad is not None
    assert not KeptKeys(5).tensors


def test_tokens_are_taken_back() -> None:
    stream = make_stream(60, padded=True)
    state = KeptKeys(5, rollback=4)
    options = {"backend": "reference"}
    want = whole(stream, 5)
    in_chunks(stream, 5, [30], state, **options)
    for start, proposed, accepted in ((30, 4, 1), (31, 4, 4), (35, 3, 0), (35, 1, 1), (36, 4, 2)):
        end = start + proposed
        wrong = make_stream(60, seed=5, padded=True)
        state.attend(*stream.part(start, start + accepted), update=True, **options)
        state.attend(*wrong.part(start + accepted, end), update=True, **options)
        state.forget(proposed - accepted)
        assert state.length == start + accepted
    assert_same(state.attend(*stream.part(38, 60), **options), want[:, 38:])
    with pytest.raises(
        ValueError, match=r"count must be from 0 to 2, which is .* rollback=4, got 3"
    ):
        state.forget(3)


def test_beams_are_reordered() -> None:
    stream = make_stream(30)
    for beams in ([1, 0], [0, 0], [1, 1, 0]):
        state = KeptKeys(5)
        in_chunks(stream, 5, [20], state, backend="reference")
        addresses = [tensor.data_ptr() for tensor in state._kept or ()]
        state.reorder(torch.tensor(beams))
        chosen = Stream(*(tensor[beams] for tensor in stream[:4]))
        got = state.attend(*chosen.part(20, 30), backend="reference")
        assert_same(got, whole(chosen, 5)[:, 20:])
        moved = [tensor.data_ptr() for tensor in state._kept or ()] != addresses
        assert moved == (len(beams) != 2)


def test_memory_stays_where_it_is() -> None:
    stream = make_stream(60)
    state = KeptKeys(5, rollback=2)
    in_chunks(stream.part(0, 10), 5, [10], state, backend="reference")
    held = [tensor for part in (state._kept, state._recent) for tensor in part or ()]
    assert state._counter is not None
    held.append(state._counter)
    addresses = [tensor.data_ptr() for tensor in held]
    in_chunks(stream.part(10, 60), 5, [1, 20, 29], state, backend="reference")
    state.forget(1)
    state.reset()
    now = [*(t for part in (state._kept, state._recent) for t in part or ()), state._counter]
    assert [tensor.data_ptr() for tensor in now] == addresses
    assert (state.capacity, state.length) == (7, 0)
    want = whole(stream, 5)
    assert_same(in_chunks(stream, 5, [60], state, backend="reference"), want)


COPIES = {
    "clone": lambda state: state.clone(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "to": lambda state: state.to("cpu"),
}


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_copies_go_on_as_the_original(make: Any) -> None:
    stream = make_stream(40)
    state = KeptKeys(5, rollback=1)
    in_chunks(stream, 5, [20], state, backend="reference")
    other = make(state)
    state.update(*make_stream(40, seed=4).part(0, 9)[1:4], backend="reference")
    got = other.attend(*stream.part(20, 40), backend="reference")
    assert_same(got, whole(stream, 5)[:, 20:])


def test_a_state_dict_restores_it() -> None:
    stream = make_stream(40)
    state = KeptKeys(5, rollback=1)
    in_chunks(stream, 5, [20], state, backend="reference")
    other = KeptKeys(5, rollback=1)
    other.load_state_dict(state.state_dict())
    assert other.length == 20
    got = other.attend(*stream.part(20, 40), backend="reference")
    assert_same(got, whole(stream, 5)[:, 20:])
    with pytest.raises(ValueError, match="state must have window_size=6, as this KeptKeys, got 5"):
        KeptKeys(6).load_state_dict(state.state_dict())


def test_what_does_not_only_grow_is_refused() -> None:
    stream = make_stream(20)
    state = KeptKeys(5)
    band = IntervalMask.sliding_window(3, 0, 20, 20)
    with pytest.raises(TypeError, match="got an IntervalMask; what a query sees must only grow"):
        state.attend(*stream[:4], band)  # type: ignore[arg-type]
    rows = torch.ones(2, 1, 20, 20, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"padding must have shape \(2, 20\).* sliding windows"):
        state.attend(*stream[:4], rows)
    per_query = stream.bias.expand(-1, -1, 20, -1)
    with pytest.raises(ValueError, match="bias must have a number for each key"):
        state.attend(*stream[:3], per_query)


def test_wrong_arguments_are_explained() -> None:
    stream = make_stream(20)
    with pytest.raises(ValueError, match="window_size must be at least 1, got 0"):
        KeptKeys(0)
    state = KeptKeys(5)
    in_chunks(stream, 5, [10], state, backend="reference")
    for wrong, text in (
        (make_stream(4, batch=1)[1:4], r"key must have the shape \[2, 5, 2, 8\] .*; each layer"),
        (make_stream(4, dtype=torch.float32)[1:4], "key must be torch.float64 on cpu"),
        (make_stream(4, bias_heads=1)[1:4], r"bias must have the shape \[2, 2, 1, 5\]"),
    ):
        with pytest.raises(ValueError, match=text):
            state.update(*wrong)
    with pytest.raises(ValueError, match=r"bias must have shape .* N=4, got \(2, 2, 1, 3\)"):
        state.update(*make_stream(4)[1:3], make_stream(3)[3])
    with pytest.raises(ValueError, match="other must have window_size=5, got 4"):
        state.merge(KeptKeys(4))
    other = KeptKeys(5)
    other.update(*make_stream(4, batch=1)[1:4])
    with pytest.raises(ValueError, match=r"key of other must have the shape .*, got \[.*\]$"):
        state.merge(other)
    with pytest.raises(TypeError, match="other must be a KeptKeys, got None"):
        state.merge(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="merge needs states of rollback=0, but other has 3"):
        state.merge(KeptKeys(5, rollback=3))
    assert state.length == 10


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_steps_compile_once(mode: Any) -> None:
    stream = make_stream(30, dtype=torch.float32)
    torch._dynamo.reset()
    counts = CompileCounter()

    def step(state: KeptKeys, *tensors: Tensor) -> Tensor:
        out = state.attend(*tensors, update=True)
        assert isinstance(out, Tensor)
        return out

    compiled = torch.compile(step, fullgraph=True, backend=counts)
    state = KeptKeys(5)
    with mode():
        outs = [state.attend(*stream.part(0, 10), update=True)]
        outs += [compiled(state, *stream.part(i, i + 1)[:4]) for i in range(10, 30)]
    assert_same(torch.cat(outs, 1), whole(stream, 5, "cpu"))
    assert counts.frame_count == 1
