# SPDX-License-Identifier: BSD-3-Clause
"""Snapshots of states and caches share no memory with them, and wrong ones are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_dmattn import AttentionCache, KeptKeys
from states import CACHES, make_layer, states, tokens, torch_saved


@pytest.mark.parametrize("rollback", [0, 2])
def test_a_snapshot_of_a_state_shares_no_memory(rollback: int) -> None:
    state = KeptKeys(4, rollback=rollback)
    state.update(*tokens(9))
    snapshot = state.state_dict()
    then = copy.deepcopy(snapshot)
    for count in (1, 3):
        state.update(*tokens(count, seed=count))
    state.reset()
    for name, value in then.items():
        assert torch.equal(snapshot[name], value) if isinstance(value, Tensor) else True
    loaded = KeptKeys(4, rollback=rollback)
    loaded.load_state_dict(snapshot)
    loaded.update(*tokens(1))
    assert torch.equal(snapshot["counter"], then["counter"])


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_a_snapshot_of_a_cache_shares_no_memory(make: Callable[[], AttentionCache]) -> None:
    layer, cache, x = make_layer(), make(), states(20)
    with torch.no_grad():
        layer(x[:, :9], cache=cache)
        snapshot = cache.state_dict()
        then = copy.deepcopy(snapshot)
        cache.truncate(0)
        layer(x[:, 9:], cache=cache)
    for part, want in ((snapshot, then), (snapshot.get("kept", {}), then.get("kept", {}))):
        for name, value in want.items():
            assert torch.equal(part[name], value) if isinstance(value, Tensor) else True


@pytest.mark.parametrize("held", [0, 2, 9])
@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_a_cache_goes_on_from_its_state_dict(make: Callable[[], AttentionCache], held: int) -> None:
    layer, cache, x = make_layer(), make(), states(20)
    with torch.inference_mode():
        if held:
            layer(x[:, :held], cache=cache)
        state = torch_saved(cache.state_dict(), weights_only=True)
        other = make()
        layer(x[:, 10:13], cache=other)  # the loaded state replaces it
        other.load_state_dict(state)
    assert other.length == held
    with torch.no_grad():
        outs = [layer(x[:, held + i : held + i + 1], cache=other) for i in range(3)]
        outs.append(layer(x[:, held + 3 :], cache=other))
        torch.testing.assert_close(torch.cat(outs, 1), layer(x)[:, held:])


def test_a_cache_of_another_max_length_may_go_on() -> None:
    layer, cache, x = make_layer(window_size=None), AttentionCache(), states(12)
    with torch.no_grad():
        layer(x[:, :9], cache=cache)
        other = AttentionCache(12)
        other.load_state_dict(cache.state_dict())
        assert other.capacity == 12
        torch.testing.assert_close(layer(x[:, 9:], cache=other), layer(x)[:, 9:])
    with pytest.raises(ValueError, match="max_length=8 and holds 0 tokens; 9 more do not fit"):
        AttentionCache(8).load_state_dict(cache.state_dict())


def kept_state() -> tuple[KeptKeys, dict[str, Any]]:
    state = KeptKeys(4, rollback=2)
    state.update(*tokens(9))
    return state, state.state_dict()


NAMES = tuple(kept_state()[1])
BAD_FIELDS: dict[str, tuple[Any, type[Exception], str]] = {
    "window_size": (5, ValueError, "state must have window_size=4, as this KeptKeys, got 5"),
    "rollback": (True, ValueError, "state must have rollback=2, as this KeptKeys, got True"),
    "start": (-1, ValueError, "start of state must be at least 0, got -1"),
    "kept.key": (torch.zeros(4, 2, 8), ValueError, r"kept.key of state must have shape \(B, rows"),
    "kept.value": (torch.zeros(1, 4, 2, 9), ValueError, r"kept.value of state must have shape"),
    "kept.bias": (torch.zeros(1, 3, 1, 4), ValueError, r"kept.bias .* \(B, \{H\|Hk\|1\}, 1, rows"),
    "kept.position": (torch.zeros(1, 2, 4), TypeError, "kept.position of state must be int64, got"),
    "recent.key": (torch.zeros(1, 3, 2, 8), ValueError, r"recent.value of state must have shape"),
    "keep_last": (1, ValueError, "state must have keep_last=0, as this KeptKeys, got 1"),
    "keep_first": (False, ValueError, "state must have keep_first=0, as this KeptKeys, got False"),
    "recent.value": (None, TypeError, r"recent.value of state must be a torch.Tensor, got None"),
    "counter": (torch.zeros(2), ValueError, r"counter of state must be int64 of shape \(3,\), got"),
    "other": (1, ValueError, "state must have no other fields than .*, got 'other'"),
}


@pytest.mark.parametrize("name", [*NAMES, "other"])
def test_a_wrong_state_dict_is_refused(name: str) -> None:
    """Each field is missing or wrong in turn; a refused load changes nothing."""
    state, fields = kept_state()
    then = copy.deepcopy(state)
    if name in fields and name not in ("keep_last", "keep_first"):  # 2.0.0a1 lacks these fields
        without = {key: value for key, value in fields.items() if key != name}
        with pytest.raises(ValueError, match=rf"state must have the field '{name}', got "):
            state.load_state_dict(without)
    if name in BAD_FIELDS:
        value, error, text = BAD_FIELDS[name]
        with pytest.raises(error, match=text):
            state.load_state_dict({**fields, name: value})
    assert state.length == then.length
    assert all(torch.equal(state.tensors[n], tensor) for n, tensor in then.tensors.items())
    with pytest.raises(TypeError, match=r"state must be a dictionary of state_dict\(\), got None"):
        state.load_state_dict(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["kept.key", "kept.bias", "recent.value"])
def test_a_state_dict_of_8_bits_is_refused(name: str) -> None:
    """No call accepts tokens of such a dtype, so the state could never be used."""
    state, fields = kept_state()
    eight = torch.float8_e4m3fn
    text = f"{name} of state must be of 16 to 64 floating-point bits, got {eight}"
    with pytest.raises(TypeError, match=text):
        state.load_state_dict({**fields, name: fields[name].to(eight)})
    assert state.tensors["key"].dtype == torch.float32
    cache = AttentionCache(rollback=2)
    with torch.no_grad():
        make_layer()(states(9), cache=cache)
    held = cache.state_dict()
    held["kept"][name] = held["kept"][name].to(eight)
    with pytest.raises(TypeError, match=text):
        cache.load_state_dict(held)


def test_a_wrong_state_dict_of_a_cache_is_refused() -> None:
    layer, x = make_layer(), states(9)
    caches = {name: make() for name, make in CACHES.items()}
    for cache in caches.values():
        with torch.no_grad():
            layer(x, cache=cache)
    window, rollback, every = (
        caches[name].state_dict() for name in ("window", "rollback", "all, growing")
    )
    for state, changes, text in (
        (every, {"key": None}, "key must be a torch.Tensor"),
        (every, {"length": 8}, "length of state must be 9, as its tensors, got 8"),
        (every, {"kept": window["kept"]}, "state must have no other fields than .*, got 'key'"),
        (every, {"every_key": False}, "state must have every_key=True, as this AttentionCache"),
        (window, {}, "state must have every_key=True, as this AttentionCache, got False"),
        (rollback, {"every_key": True}, "state must have rollback=0, as this AttentionCache, got"),
    ):
        cache = caches["all, growing"]
        with pytest.raises((TypeError, ValueError), match=text):
            cache.load_state_dict({**state, **changes})
        assert cache.length == 9
    for name in every:
        without = {key: value for key, value in every.items() if key != name}
        with pytest.raises(ValueError, match=rf"state must have the field '{name}', got "):
            caches["all, growing"].load_state_dict(without)
    without = {key: value for key, value in window["kept"].items() if key != "window_size"}
    with pytest.raises(ValueError, match="state must have the field 'window_size', got "):
        caches["window"].load_state_dict({**window, "kept": without})
