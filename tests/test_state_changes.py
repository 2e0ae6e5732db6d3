# SPDX-License-Identifier: BSD-3-Clause
"""States and caches change only in accepted calls, once for each call, and share no memory."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flash_dmattn import AttentionCache, DynamicMaskAttention, KeptKeys, flash_dmattn_func
from old_versions import why_not_traced
from states import CACHES, make_layer, states, tokens, torch_saved

REENTRANT = pytest.mark.parametrize("use_reentrant", [False, True])


def gradients(layer: DynamicMaskAttention, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(layer.parameters())))


# Activation checkpointing


def compiled(function: Any, *, fullgraph: bool = True) -> Any:
    if reason := why_not_traced():
        pytest.skip(reason)
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=fullgraph, backend="aot_eager")


@REENTRANT
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("held", [0, 16])
def test_a_cache_is_not_appended_to_by_a_recomputation(
    held: int, is_compiled: bool, use_reentrant: bool
) -> None:
    layer, cache = make_layer(), AttentionCache()
    call = compiled(layer) if is_compiled else layer
    if held:
        layer(states(held), cache=cache)
        cache.detach()
    x = states(16, seed=1).requires_grad_()
    out = checkpoint(lambda t: call(t, cache=cache), x, use_reentrant=use_reentrant)
    with pytest.raises(RuntimeError, match="an AttentionCache cannot be changed during a backward"):
        out.square().mean().backward()
    assert cache.length == held + 16


@REENTRANT
def test_a_cache_of_all_keys_is_not_appended_to_by_a_recomputation(use_reentrant: bool) -> None:
    layer, cache = make_layer(window_size=None), AttentionCache()

    def append(x: Tensor) -> Tensor:
        with torch.no_grad():
            out = layer(x, cache=cache)
        return x.sin() * out

    def reorder(x: Tensor) -> Tensor:
        cache.reorder(torch.tensor([1, 0]))
        return x.sin().square()

    def truncate(x: Tensor) -> Tensor:
        cache.truncate(cache.length - 1)
        return x.sin().square()

    for change in (append, reorder, truncate):
        x = states(5).requires_grad_()
        out = checkpoint(change, x, use_reentrant=use_reentrant)
        length, key = cache.length, cache.state_dict()["key"]
        text = "an AttentionCache cannot be changed during a backward pass"
        with pytest.raises(RuntimeError, match=text):
            out.sum().backward()
        assert cache.length == length
        assert torch.equal(cache.state_dict()["key"], key)


CHANGES: dict[str, Callable[[KeptKeys], object]] = {
    "one token": lambda state: state.update(*tokens(1)),
    "tokens": lambda state: state.update(*tokens(3)),
    "merge": lambda state: state.merge(KeptKeys(4).updated(*tokens(2))),
    "reorder": lambda state: state.reorder(torch.tensor([0])),
    "forget": lambda state: state.forget(1),
    "reset": lambda state: state.reset(),
}


@REENTRANT
@pytest.mark.parametrize("change", CHANGES)
def test_a_state_is_not_changed_by_a_recomputation(change: str, use_reentrant: bool) -> None:
    state = KeptKeys(4, rollback=3 if change == "forget" else 0)
    state.update(*tokens(9))

    def call(x: Tensor) -> Tensor:
        with torch.no_grad():
            CHANGES[change](state)
        return x.sin().square()

    out = checkpoint(call, torch.ones(3, requires_grad=True), use_reentrant=use_reentrant)
    length, held = state.length, {name: t.clone() for name, t in state.tensors.items()}
    with pytest.raises(RuntimeError, match="a KeptKeys cannot be changed during a backward pass"):
        out.sum().backward()
    assert state.length == length
    assert all(torch.equal(state.tensors[name], tensor) for name, tensor in held.items())


@REENTRANT
@pytest.mark.parametrize("what", [pytest.param("layer", marks=pytest.mark.slow), "function", ""])
def test_a_cache_that_the_function_makes_is_checkpointed(what: str, use_reentrant: bool) -> None:
    """Gradients equal those without checkpointing, also for a copy of an earlier cache."""
    layer, before = make_layer(), AttentionCache()
    with torch.no_grad():
        layer(states(9), cache=before)

    def stream(x: Tensor, make: Callable[[], AttentionCache], call: Any = layer) -> Tensor:
        cache = make()
        return torch.cat([call(part, cache=cache) for part in x.split([5, 1, 10], 1)], 1)

    call = compiled(layer) if what == "layer" else layer
    function = compiled(stream) if what == "function" else stream
    for make in (AttentionCache, *([] if what else [lambda: copy.deepcopy(before)])):
        x = states(16, seed=1).requires_grad_()
        want = gradients(layer, stream(x, make).square().mean())
        out = checkpoint(function, x, make, call, use_reentrant=use_reentrant)
        layer.zero_grad()
        out.square().mean().backward()
        for parameter, gradient in zip(layer.parameters(), want, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)


# Inference mode


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": torch_saved,
    "torch.save of weights": lambda value: torch_saved(value, weights_only=True),
}
MADE: dict[str, Callable[[KeptKeys], KeptKeys]] = {
    **COPIES,
    "updated": lambda state: state.updated(*tokens(3, seed=2)),
    "merged": lambda state: state.merged(KeptKeys(4, start=20).updated(*tokens(3, seed=2))),
    "merged with nothing": lambda state: state.merged(KeptKeys(4)),
    "clone": lambda state: state.clone(),
    "detach": lambda state: state.detach(),
    "to": lambda state: state.to("cpu"),
}


@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize("how", MADE)
def test_what_inference_mode_made_goes_on(how: str, is_left: bool) -> None:
    state = KeptKeys(4)
    state.update(*tokens(9))
    want = MADE[how](state)
    with torch.inference_mode():
        got = MADE[how](state)
    with torch.inference_mode(not is_left), torch.no_grad():
        for each in (got, want):
            each.update(*tokens(2, seed=3))
            each.update(*tokens(1, seed=4))
            each.reorder(torch.tensor([0]))
        for name, tensor in want.tensors.items():
            assert torch.equal(got.tensors[name], tensor)
        got.reset()


@pytest.mark.parametrize("how", [*(name for name in MADE if name not in COPIES), "update"])
def test_what_compiled_code_made_in_inference_mode_goes_on(how: str) -> None:
    def update(state: KeptKeys) -> KeptKeys:
        result = KeptKeys(4)
        result.update(*tokens(3, seed=5))
        return result

    state, make = KeptKeys(4), MADE.get(how, update)
    state.update(*tokens(9))
    want = make(state)
    with torch.inference_mode():
        got = compiled(make, fullgraph=False)(state)
    token, more, order = tokens(1, seed=4), tokens(2, seed=3), torch.tensor([0])

    @torch.compile(backend="aot_eager")
    def change(state: KeptKeys) -> None:
        state.update(*token)
        state.update(*more)
        state.reorder(order)

    with torch.no_grad():
        for each in (got, want):
            change(each)
            each.update(*token)
            each.update(*more)
        for name, tensor in want.tensors.items():
            assert torch.equal(got.tensors[name], tensor)
        got.reset()


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_caches_of_compiled_code_in_inference_mode_go_on(
    make: Callable[[], AttentionCache],
) -> None:
    layer, x, cache = make_layer(), states(15), make()
    call = compiled(layer)
    with torch.inference_mode():
        call(x[:, :10], cache=cache)
        torch.compile(cache.reorder, backend="aot_eager")(torch.tensor([0, 1]))
    with torch.no_grad():
        call(x[:, 10:12], cache=cache)
        layer(x[:, 12:13], cache=cache)
        torch.testing.assert_close(layer(x[:, 13:], cache=cache), layer(x)[:, 13:])
        cache.truncate(0)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("how", COPIES)
def test_caches_copied_in_inference_mode_go_on(
    how: str, make: Callable[[], AttentionCache], count: int
) -> None:
    layer, x = make_layer(), states(12 + count)
    with torch.inference_mode():
        cache = make()
        layer(x[:, :10], cache=cache)
        copied = COPIES[how](cache)
        layer(x[:, 10:12], cache=copied)
    with torch.no_grad():
        got = layer(x[:, 12:], cache=copied)
        torch.testing.assert_close(got, layer(x)[:, 12:])
        copied.reorder(torch.tensor([1, 0]))
        copied.truncate(0)
    assert cache.length == 10


@pytest.mark.parametrize("how", COPIES)
def test_states_are_copied_after_any_call(how: str) -> None:
    state = KeptKeys(4)
    state.update(*tokens(9))
    for position in range(2):
        key, value, bias = tokens(1, seed=position)
        query = torch.randn(1, 1, 2, 8)
        state.attend(query, key, value, bias, update=True, softmax_scale=numpy.float64(0.5))
    copied = COPIES[how](state)
    assert copied.length == 11
    assert all(torch.equal(copied.tensors[name], held) for name, held in state.tensors.items())


# Refused calls

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "sink": ({"sink": torch.zeros(3)}, "sink has shape"),
    "softcap": ({"softcap": -1.0}, "softcap"),
    "softmax_scale": ({"softmax_scale": float("nan")}, "scale"),
    "flag": ({"softcap": True}, "softcap must be a number"),
    "numbers": ({"softmax_scale": torch.ones(2)}, "softmax_scale must be a number"),
    "backend": ({"backend": "nope"}, "nope"),
    "head_dim": ({"query": torch.zeros(1, 1, 2, 4)}, "query"),
    "dtype": ({"query": torch.zeros(1, 1, 2, 8, dtype=torch.float64)}, "dtype"),
    "batch": ({"query": torch.zeros(2, 1, 2, 8)}, "query"),
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("case", WRONG)
def test_a_refused_call_takes_nothing_in(case: str, is_warm: bool, count: int) -> None:
    state = KeptKeys(4)
    state.update(*tokens(9))
    query = torch.randn(1, count, 2, 8)
    arguments: dict[str, Any] = {"query": query, "softmax_scale": 1.0, "softcap": 1.0}
    if is_warm:
        key, value, bias = tokens(count)
        state.attend(key=key, value=value, bias=bias, update=True, **arguments)
    length, held = state.length, {name: t.clone() for name, t in state.tensors.items()}
    changes, text = WRONG[case]
    arguments |= changes
    if "query" in changes:
        arguments["query"] = changes["query"].expand(-1, count, -1, -1)
    key, value, bias = tokens(count, seed=1)
    with pytest.raises((TypeError, ValueError), match=text):
        state.attend(key=key, value=value, bias=bias, update=True, **arguments)
    assert state.length == length
    assert all(torch.equal(state.tensors[name], tensor) for name, tensor in held.items())
    other = state.clone()
    got = state.attend(query, key, value, bias, update=True)
    torch.testing.assert_close(got, other.attend(query, key, value, bias))
    assert state.length == length + count


@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_queries_are_those_of_the_tokens(rows: int, update: bool) -> None:
    """One more row would be of an earlier token, whose visible keys may be dropped already."""
    state = KeptKeys(4)
    state.update(*tokens(9))
    with pytest.raises(ValueError, match=rf"query must have .* 2 tokens .* \(1, {rows}, 2, 8\)"):
        state.attend(torch.randn(1, rows, 2, 8), *tokens(2), update=update)
    assert state.length == 9


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("held", [0, 9])
@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_a_refused_call_of_the_layer_appends_nothing(
    make: Callable[[], AttentionCache], held: int, count: int
) -> None:
    layer, cache, x = make_layer(), make(), states(held + count)
    with torch.no_grad():
        if held:
            layer(x[:, :held], cache=cache)
        capacity = cache.capacity
        layer.softcap = -1.0
        with pytest.raises(ValueError, match="softcap"):
            layer(x[:, held:], cache=cache)
        assert (cache.length, cache.capacity) == (held, capacity)
        layer.softcap = 0.0
        torch.testing.assert_close(layer(x[:, held:], cache=cache), layer(x)[:, held:])


def test_a_refused_first_call_leaves_a_cache_of_either_kind() -> None:
    """An accepted mask beyond padding makes it a cache of all keys; a refused call does not."""
    layer, cache, x = make_layer(), AttentionCache(), states(5)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    with torch.no_grad():
        with pytest.raises(ValueError, match="attn_mask"):
            layer(x, mask[..., :3, :].repeat(1, 3, 1, 1), cache=cache)
        layer(x, cache=cache)
        assert cache.kept is not None
        cache, layer.softcap = AttentionCache(), -1.0
        with pytest.raises(ValueError, match="softcap"):
            layer(x, cache=cache)
        layer.softcap = 0.0
        torch.testing.assert_close(layer(x, mask, cache=cache), layer(x, mask))
    assert cache.kept is None


# Memory, order and start


def test_a_state_moved_to_its_own_device_is_another() -> None:
    state = KeptKeys(3)
    key, value, _ = tokens(3)
    state.update(key, value, torch.tensor([[[[1.0, 2.0, 3.0]]]]).expand(1, 2, 1, 3))
    other = state.to("cpu")
    state.update(*(t[:, :1] for t in (key, value)), torch.full((1, 2, 1, 1), 2.5))
    assert (state.length, other.length) == (4, 3)
    assert other.tensors["bias"].min() == 1


def test_reset_goes_back_to_the_start_of_the_earlier() -> None:
    earlier, later = KeptKeys(4), KeptKeys(4, start=10)
    earlier.update(*tokens(10))
    later.update(*tokens(5))
    for one, other in ((earlier, later), (later, earlier)):
        merged = one.merged(other)
        assert merged.length == 15
        merged.reset()
        assert merged.length == 0
    later.merge(earlier)
    later.reset()
    assert later.length == 0


# In a window of 3, tokens 1, 2 and 3 are visible; 3 is in the slot of 0, in front of 1. A further
# token drops one of the equal biases 1 and 3, and the earlier one is kept.
_BIASES = (0.0, 1.0, 2.0, 1.0)


def unordered() -> KeptKeys:
    state = KeptKeys(3)
    for position, bias in enumerate(_BIASES):
        state.update(*tie_tokens(position, [bias]))
    return state


def tie_tokens(first: int, biases: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens whose values are their positions."""
    value = torch.arange(first, first + len(biases), dtype=torch.float32).view(1, -1, 1, 1)
    return torch.zeros(1, len(biases), 1, 1), value, torch.tensor(biases).view(1, 1, 1, -1)


def loaded(state: KeptKeys) -> KeptKeys:
    other = KeptKeys(3)
    other.load_state_dict(state.state_dict())
    return other


def merged_into_nothing(state: KeptKeys) -> KeptKeys:
    other = KeptKeys(3)
    other.merge(state)
    return other


UNORDERED: dict[str, Callable[[KeptKeys], KeptKeys]] = {
    "steps": lambda state: state,
    "load_state_dict": loaded,
    "merge into nothing": merged_into_nothing,
    "merged": lambda state: KeptKeys(3).merged(state),
    "to": lambda state: state.to("cpu"),
    **COPIES,
}


@pytest.mark.parametrize("how", UNORDERED)
def test_ties_go_by_position_wherever_a_key_lies(how: str) -> None:
    state = UNORDERED[how](unordered())
    assert [int(p) for p in state.tensors["position"].flatten()] == [3, 1, 2]
    following = tie_tokens(4, [3.0, -torch.inf])
    every = tie_tokens(0, [*_BIASES, 3.0, -torch.inf])
    query = torch.zeros(1, 2, 1, 1)
    got = state.attend(query, *following)
    want = flash_dmattn_func(
        query, *every[:2], attn_bias=every[2], is_causal=True, window_size=3, backend="reference"
    )
    torch.testing.assert_close(got, want)
    state.update(*following)
    assert sorted(int(p) for p in state.tensors["position"].flatten()) == [1, 2, 4]
