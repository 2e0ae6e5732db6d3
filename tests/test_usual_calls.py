# SPDX-License-Identifier: BSD-3-Clause
"""Calls that the core reads itself give the same records as calls read in Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from direct import needs_direct_calls
from flash_dmattn import IntervalMask, _core, dynamic_mask, flash_dmattn_func, ops
from flash_dmattn.record import AttentionInputs
from support import Target, rand_bool


def tensors(device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    query, key, value, bias = (
        torch.randn(shape, device=device)
        for shape in ((2, 9, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16), (2, 2, 1, 9))
    )
    made = {"query": query.to(dtype), "key": key.to(dtype), "value": value.to(dtype)}
    return {**made, "attn_bias": bias, "sink": torch.randn(4, device=device)}


# Masks, made for a device.
MASKS: dict[str, Any] = {
    "keys": lambda device: rand_bool(2, 2, 1, 9).to(device),
    "rows": lambda device: rand_bool(1, 4, 9, 9).to(device),
    "intervals": lambda device: IntervalMask.sliding_window(3, 1, 9, 9, device=device),
    "selection": lambda device: dynamic_mask(tensors(device, torch.float32)["attn_bias"], 3, True),
}


def with_most(keys: Any) -> IntervalMask:
    mask = IntervalMask.sliding_window(3, 1, 9, 9)
    mask.max_kept = keys
    return mask


SETTINGS: list[dict[str, Any]] = [
    {},
    *({"attn_mask": name, "is_causal": True} for name in MASKS),
    {"attn_mask": "intervals", "wide_bias": True},
    {"is_causal": True, "window_size": 3},
    {"is_causal": True, "window_size": 2, "keep_last": 3, "keep_first": 1},
    {"is_causal": True, "window_size": 0, "keep_last": 8},
    {"is_causal": True, "window_size": 0, "deterministic": True},
    {"is_causal": False, "softmax_scale": 0.3, "softcap": 2.0},
    {"is_causal": None, "return_lse": True, "deterministic": False},
]
WITHOUT: list[tuple[str, ...]] = [(), ("sink",), ("attn_bias", "sink")]


def recorded(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> tuple[AttentionInputs, Any]:
    """Return the record of a call, and its results."""
    seen: list[AttentionInputs] = []
    compute = ops._attention_of

    def noted(chosen: Any, backend: str, call: _core.Call, *others: Any, **named: Any) -> Any:
        seen.append(AttentionInputs(*call.fields))
        return compute(chosen, backend, call, *others, **named)

    with monkeypatch.context() as patch:
        patch.setattr(ops, "_attention_of", noted)
        results = flash_dmattn_func(**arguments)
    return seen[0], results


@needs_direct_calls
@pytest.mark.parametrize("without", WITHOUT, ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_both_ways_make_the_same_record(
    settings: dict[str, Any],
    without: tuple[str, ...],
    pack_target: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "attn_bias" in without and "window_size" in settings:
        pytest.skip("a window needs a bias")
    given = tensors(pack_target.device, pack_target.dtypes[-1])
    arguments = {name: t for name, t in given.items() if name not in without} | settings
    if "attn_mask" in arguments:
        arguments["attn_mask"] = MASKS[arguments["attn_mask"]](pack_target.device)
    if arguments.pop("wide_bias", False) and "attn_bias" in arguments:
        arguments["attn_bias"] = arguments["attn_bias"].double()
    looked_at: list[AttentionInputs] = []
    look = ops.attention

    def noted(inputs: AttentionInputs, *others: Any, **named: Any) -> Any:
        looked_at.append(inputs)
        return look(inputs, *others, **named)

    with monkeypatch.context() as patch:
        patch.setattr(ops, "attention", noted)
        one, out = recorded(monkeypatch, **arguments)
        assert not looked_at or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
        patch.setattr(ops, "usual_attention", lambda *args, **named: None)
        other, want = recorded(monkeypatch, **arguments)
        assert looked_at
    for name, a, b in zip(AttentionInputs._fields, one, other, strict=True):
        assert a is b if isinstance(a, Tensor) else a == b, name
    torch.testing.assert_close(out, want, atol=0, rtol=0)


@pytest.mark.parametrize(
    "change",
    [
        {"query": lambda t: t[0]},
        {"key": lambda t: t.double()},
        {"value": lambda t: t.to("meta")},
        {"attn_bias": lambda t: t[:, 0, 0]},
        {"attn_bias": lambda t: t[:1, :, 0]},
        {"attn_bias": lambda t: t[:, :, 0, :-1]},
        {"attn_bias": lambda t: t[:1].expand(2, -1, -1, -1)},
        {"attn_bias": lambda t: t.double()},
        {"attn_bias": lambda t: None},
        {"attn_bias": lambda t: t.expand(-1, -1, 9, -1).contiguous()},
        {"query": lambda t: t.numpy()},
        {"query": lambda t: t[:, :1]},
        {"key": lambda t: t.as_subclass(type("Own", (Tensor,), {}))},
        {"softmax_scale": lambda _: 1},
        {"softcap": lambda _: torch.tensor(1.0)},
        {"window_size": lambda _: True},
        {"window_size": lambda _: 9},
        {"window_size": lambda _: -1},
        {"window_size": lambda _: None},
        {"window_size": lambda _: 5},
        {"keep_last": lambda _: 6},
        {"keep_last": lambda _: 2**63 - 1},
        {"keep_last": lambda _: True},
        {"keep_last": lambda _: None},
        {"keep_first": lambda _: -1},
        {"keep_first": lambda _: 1.0},
        {"is_causal": lambda _: 1},
        {"is_causal": lambda _: False},
        {"attn_mask": lambda _: rand_bool(2, 1, 1, 9)},
        {"attn_mask": lambda _: IntervalMask.sliding_window(3, 1, 9, 9)},
        {"window_size": None, "attn_mask": lambda _: rand_bool(2, 9)},
        {"window_size": None, "attn_mask": lambda _: rand_bool(1, 1, 1, 9).expand(2, 1, 1, 9)},
        {"window_size": None, "attn_mask": lambda _: torch.zeros(2, 1, 1, 9)},
        {"window_size": None, "attn_mask": lambda _: rand_bool(2, 1, 1, 9).to("meta")},
        {"window_size": None, "attn_mask": lambda _: rand_bool(2, 1, 1, 9).numpy()},
        {"window_size": None, "attn_mask": lambda _: IntervalMask.sliding_window(3, 1, 8, 9)},
        {"window_size": None, "attn_mask": lambda _: with_most(2.5)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_is_not_usual_is_looked_at(change: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        **tensors("cpu", torch.float32),
        "softmax_scale": None,
        "is_causal": True,
        "softcap": None,
        "window_size": 3,
        "keep_last": 2,
        "keep_first": 2,
    }
    if "window_size" in change and change["window_size"] is None:
        given.update(window_size=None, keep_last=0, keep_first=0)
    for name, made in change.items():
        if made is not None:
            given[name] = made(given.get(name))
    names = ("query", "key", "value", "attn_bias", "sink")
    places = tuple(given.pop(name) for name in names)
    settings = (given[n] for n in ("softmax_scale", "is_causal", "softcap"))
    counts = (given["window_size"], given["keep_last"], given["keep_first"])
    mask = given.get("attn_mask")
    assert ops.usual_attention(places, mask, *settings, counts, None, return_lse=False) is None


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_what_is_missing_is_named(name: str) -> None:
    given = {**tensors("cpu", torch.float32), name: None}
    with pytest.raises(TypeError, match=rf"^{name} must be a torch.Tensor, got None$"):
        flash_dmattn_func(**given)


@pytest.mark.parametrize("window", [None, 3])
def test_a_bias_of_three_dimensions(
    window: int | None, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernel packs read it unchanged; other backends get a query dimension."""
    if target.backend not in ("cpu", "cuda"):
        monkeypatch.setenv("FLASH_DMATTN_BACKEND", target.backend)
    given = tensors(target.device, target.dtypes[-1])
    arguments: dict[str, Any] = {**given, "is_causal": True, "window_size": window}
    results = []
    for bias in (given["attn_bias"], given["attn_bias"][:, :, 0]):
        leaf = bias.clone().requires_grad_()
        out = flash_dmattn_func(**{**arguments, "attn_bias": leaf})
        out.backward(torch.ones_like(out))
        assert leaf.grad is not None
        assert leaf.grad.shape == leaf.shape
        results.append((out.detach(), leaf.grad.reshape(2, 2, 9)))
    torch.testing.assert_close(results[0], results[1], atol=0, rtol=0)
