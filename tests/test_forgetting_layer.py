# SPDX-License-Identifier: BSD-3-Clause
"""ForgettingAttention against the formula, and its cache against calls over all tokens."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import logsigmoid, rms_norm

from flash_dmattn import ForgettingAttention, ForgettingCache
from support import Target, assert_accurate, randn
from test_forgetting import decay, plain

EMBED = 24
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "gates of query heads": {"num_gates": 4},
    "one gate": {"num_kv_heads": 1},
    "no norm": {"qk_norm": False, "softmax_scale": 0.3},
    "projection bias": {"projection_bias": True},
    "all keys": {"prune": None},
}


def make(target: Target | None = None, dtype: torch.dtype | None = None, **changes: Any) -> Any:
    torch.manual_seed(0)
    arguments = {"num_kv_heads": 2, "prune": -60.0, "half_lives": (0.5, 3.0), "init_std": 0.3}
    layer = ForgettingAttention(EMBED, 4, dtype=dtype, **(arguments | changes))
    if target is None:
        return layer
    layer.backend = target.backend
    return layer.to(target.device, dtype or target.dtypes[0])


def states(batch: int, length: int, layer: ForgettingAttention, seed: int = 0) -> Tensor:
    weight = layer.q_proj.weight
    return randn(batch, length, EMBED, seed=seed).to(weight.device, weight.dtype)


def formula(
    layer: ForgettingAttention, x: Tensor, dtype: torch.dtype, padding: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output of plain operations in a dtype, and the parameters that it used."""
    parameters = {
        name: parameter.detach().cpu().to(dtype).requires_grad_()
        for name, parameter in layer.named_parameters()
    }

    def linear(name: str, states: Tensor) -> Tensor:
        bias = parameters.get(f"{name}.bias")
        return torch.nn.functional.linear(states, parameters[f"{name}.weight"], bias)

    def heads(name: str, norm: str | None = None) -> Tensor:
        made = linear(name, x).unflatten(-1, (-1, layer.head_dim))
        if norm is None or f"{norm}.weight" not in parameters:
            return made
        return rms_norm(made, made.shape[-1:], parameters[f"{norm}.weight"], 1e-6)

    gates = logsigmoid(
        linear("f_proj", x).transpose(1, 2).to(torch.promote_types(dtype, torch.float32))
    )
    query = heads("q_proj", "q_norm")
    if layer.softmax_scale is not None:
        query = query * (layer.softmax_scale * layer.head_dim**0.5)
    out, _ = plain(query, heads("k_proj", "k_norm"), heads("v_proj"), decay(gates, padding))
    return linear("o_proj", out.flatten(-2)), parameters


def formula_results(
    layer: ForgettingAttention, x: Tensor, dtype: torch.dtype, padding: Tensor | None
) -> dict[str, Tensor]:
    x = x.detach().cpu().to(dtype).requires_grad_()
    out, parameters = formula(layer, x, dtype, padding)
    return gathered(out, {"x": x, **parameters})


def gathered(out: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    dout = randn(*out.shape, seed=9).to(out.device, out.dtype)
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    named = {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: t.detach().cpu() for name, t in {"out": out, **named}.items()}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_layer_equals_the_formula(name: str, padded: bool, target: Target) -> None:
    layer = make(target, **SETTINGS[name])
    padding = None
    if padded:
        padding = torch.ones(2, 19, dtype=torch.bool)
        padding[1, :6] = False
    x = states(2, 19, layer).requires_grad_()
    given_padding = None if padding is None else padding.to(target.device)
    got = gathered(layer(x, padding=given_padding), {"x": x, **dict(layer.named_parameters())})
    truth = formula_results(layer, x, torch.float64, padding)
    assert_accurate(got, truth, formula_results(layer, x, x.dtype, padding))


def test_padding_on_the_left_is_as_if_it_were_not_there(target: Target) -> None:
    layer = make(target, prune=-4.0)
    x = states(2, 19, layer)
    padding = torch.ones(2, 19, dtype=torch.bool, device=x.device)
    padding[1, :6] = False
    out, alone = layer(x, padding=padding), layer(x[1:, 6:])
    tolerance = 32 * torch.finfo(x.dtype).eps
    torch.testing.assert_close(out[1:, 6:], alone, atol=tolerance, rtol=tolerance)
    assert not out[1, :6].any()


def test_packed_sequences(target: Target) -> None:
    layer = make(target, prune=-4.0, rotary_base=100.0)
    x = states(1, 30, layer)[0]
    cu_seqlens = torch.tensor([0, 11, 11, 30], dtype=torch.int32, device=x.device)
    tolerance = 32 * torch.finfo(x.dtype).eps
    for most in (None, 19):
        out = layer(x, cu_seqlens=cu_seqlens, max_seqlen=most)
        for part in (slice(0, 11), slice(11, 30)):
            alone = layer(x[None, part])[0]
            torch.testing.assert_close(out[part], alone, atol=tolerance, rtol=tolerance)


def test_half_lives_are_spread_over_the_heads() -> None:
    layer = ForgettingAttention(48, 6, num_kv_heads=3, half_lives=(4.0, 64.0))
    lives = -math.log(2) / logsigmoid(layer.f_proj.bias.double())
    torch.testing.assert_close(lives, torch.tensor([4.0, 16.0, 64.0]).double(), rtol=1e-5, atol=0)
    layer = ForgettingAttention(48, 6, num_kv_heads=1, half_lives=(4.0, 64.0))
    life = -math.log(2) / logsigmoid(layer.f_proj.bias.double())
    torch.testing.assert_close(life, torch.tensor([16.0]).double(), rtol=1e-5, atol=0)


@settings(max_examples=25)
@given(
    chunks=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    gates=st.sampled_from([2, 4]),
    rotary=st.booleans(),
    padded=st.booleans(),
    grads=st.booleans(),
)
def test_chunks_equal_one_call(
    chunks: list[int], gates: int, rotary: bool, padded: bool, grads: bool
) -> None:
    layer = make(num_gates=gates, prune=-4.0, rotary_base=50.0 if rotary else None)
    length = sum(chunks)
    x = states(2, length, layer, seed=length)
    padding = torch.rand(2, length, generator=torch.Generator().manual_seed(length)) < 0.7
    cache, parts, begin = ForgettingCache(), [], 0
    with torch.set_grad_enabled(grads):
        for count in chunks:
            part = slice(begin, begin + count)
            given_padding = padding[:, part] if padded else None
            parts.append(layer(x[:, part], cache=cache, padding=given_padding))
            begin += count
        whole = layer(x, padding=padding if padded else None)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-4)
    assert cache.length == length


@pytest.mark.parametrize("capacity", [1, 3, 8])
def test_a_capacity_is_a_window(capacity: int, target: Target) -> None:
    layer = make(target, prune=-30.0)
    x = states(2, 40, layer)
    cache, parts = ForgettingCache(capacity), []
    with torch.no_grad():
        for begin, end in ((0, 13), (13, 14), (14, 15), (15, 17), (17, 33), (33, 40)):
            parts.append(layer(x[:, begin:end], cache=cache))
            assert cache.rows <= max(end - begin, 2 * capacity)
        got = torch.cat(parts, 1)
        each = [layer(x[:, max(0, i + 1 - capacity) : i + 1])[:, -1:] for i in range(40)]
    tolerance = 32 * torch.finfo(x.dtype).eps
    torch.testing.assert_close(got, torch.cat(each, 1), atol=tolerance, rtol=tolerance)


def test_memory_follows_what_has_not_decayed() -> None:
    layer = make(prune=-8.0)
    x = states(1, 700, layer)
    cache = ForgettingCache()
    with torch.inference_mode():
        whole = layer(x)
        parts = [layer(x[:, :400], cache=cache)]
        assert cache.rows < 100
        for i in range(400, 700):
            parts.append(layer(x[:, i : i + 1], cache=cache))
            assert cache.rows < 200
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("capacity", [None, 50])
def test_gradients_of_a_stream(capacity: int | None) -> None:
    layer = make(prune=-6.0)
    x = states(2, 45, layer).requires_grad_()
    leaves = {"x": x, **dict(layer.named_parameters())}
    cache = ForgettingCache(capacity)
    parts = [layer(x[:, begin:end], cache=cache) for begin, end in ((0, 20), (20, 21), (21, 45))]
    got, wanted = gathered(torch.cat(parts, 1), leaves), gathered(layer(x), leaves)
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, atol=2e-5, rtol=2e-4, msg=name)
    cache.detach()
    out = layer(x[:, :1], cache=cache)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert not grad[:, 1:].any()


def test_beams() -> None:
    layer = make(prune=-6.0)
    x, more = states(3, 20, layer), states(4, 3, layer, seed=1)
    indices = torch.tensor([2, 0, 0, 1])
    cache = ForgettingCache()
    with torch.inference_mode():
        layer(x, cache=cache)
        cache.reorder(indices)
        got = layer(more, cache=cache)
        wanted = layer(torch.cat([x[indices], more], 1))[:, 20:]
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="indices must be from 0 to 3, as the cache holds 4 seq"):
        cache.reorder(torch.tensor([4]))


def test_a_refused_call_changes_nothing() -> None:
    layer, other = make(prune=-6.0), make(prune=-5.0)
    x = states(2, 30, layer)
    cache = ForgettingCache()
    with torch.no_grad():
        layer(x[:, :20], cache=cache)
        rows = cache.rows
        with pytest.raises(
            ValueError, match=r"prune must be -6.0, as in the earlier calls .* -5.0"
        ):
            other(x[:, 20:], cache=cache)
        with pytest.raises(
            ValueError, match=r"the cache holds key of shape \[2, 10, 2, 6\] but for"
        ):
            layer(x[:1, 20:], cache=cache)
        layer.backend = "cuda"
        with pytest.raises(ValueError, match="backend='cuda' runs on cuda tensors"):
            layer(x[:, 20:], cache=cache)
        assert (cache.length, cache.rows) == (20, rows)
        layer.backend = None
        torch.testing.assert_close(layer(x[:, 20:], cache=cache), layer(x)[:, 20:])


@pytest.mark.parametrize("whole", [False, True])
def test_a_saved_cache_goes_on(whole: bool) -> None:
    layer = make(prune=-6.0)
    x = states(2, 30, layer)
    cache, file = ForgettingCache(), io.BytesIO()
    with torch.no_grad():
        layer(x[:, :20], cache=cache)
        torch.save(cache if whole else cache.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        if not whole:
            state, loaded = loaded, ForgettingCache()
            loaded.load_state_dict(state)
            with pytest.raises(ValueError, match="state must have capacity=7, as this Forg"):
                ForgettingCache(7).load_state_dict(state)
            with pytest.raises(ValueError, match="state must have the field 'last'"):
                loaded.load_state_dict({n: t for n, t in state.items() if n != "last"})
        torch.testing.assert_close(layer(x[:, 20:], cache=loaded), layer(x)[:, 20:])
    assert loaded.length == 30
    loaded.reset()
    assert (loaded.length, loaded.rows) == (0, 0)


def test_a_prompt_in_inference_mode_and_gradients_afterwards() -> None:
    layer = make(prune=-6.0)
    x = states(2, 30, layer)
    cache = ForgettingCache()
    with torch.inference_mode():
        layer(x[:, :20], cache=cache)
    layer(x[:, 20:], cache=cache).sum().backward()
    assert layer.f_proj.weight.grad.any()


@pytest.mark.parametrize("how", ["compiled", "exported"])
def test_as_one_program(how: str) -> None:
    layer = make(prune=-6.0)
    x = states(2, 20, layer)
    if how == "compiled":
        program = torch.compile(layer, backend="aot_eager", fullgraph=True)
    else:
        program = torch.export.export(layer, (x,)).module()
    torch.testing.assert_close(program(x), layer(x))


@pytest.mark.parametrize("cached", [False, True])
def test_under_autocast(cached: bool) -> None:
    layer = make(prune=-6.0)
    x = states(2, 20, layer)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, cache=ForgettingCache() if cached else None)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), layer(x), atol=5e-2, rtol=5e-2)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "gates of other heads": (
        {"num_gates": 3},
        ValueError,
        "num_gates must be num_kv_heads=2 or num_heads=4, got 3",
    ),
    "one half-life": ({"half_lives": 4.0}, TypeError, "half_lives must be a pair of numbers"),
    "half-lives that fall": (
        {"half_lives": (4.0, 2.0)},
        ValueError,
        "half_lives must be positive and not fall, got 4.0 and 2.0",
    ),
    "prune above 0": ({"prune": 1.0}, ValueError, "prune must be a finite log decay of at most 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_layers(name: str) -> None:
    changes, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        make(**changes)


def test_wrong_calls_of_the_layer() -> None:
    layer = make()
    x = states(2, 5, layer)
    bounds = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="cache cannot be combined with cu_seqlens"):
        layer(x[0], cu_seqlens=bounds, cache=ForgettingCache())
    with pytest.raises(TypeError, match="cache must be a ForgettingCache or None"):
        layer(x, cache=3)
    with pytest.raises(ValueError, match=r"padding must have shape \(2, 5\)"):
        layer(x, padding=torch.ones(2, 4, dtype=torch.bool))
