# SPDX-License-Identifier: BSD-3-Clause
"""ForgettingAttention against the formula; its cache against calls over all tokens."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import logsigmoid, rms_norm
from torch.utils.checkpoint import checkpoint

from flash_dmattn import ForgettingAttention, ForgettingCache
from states import torch_saved
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
    """Return the output of plain operations in a dtype, and the parameters used."""
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


ROLLBACK = 5
STEPS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, ROLLBACK)), min_size=1, max_size=8)


@settings(max_examples=60)
@given(
    steps=STEPS,
    gates=st.sampled_from([2, 4]),
    capacity=st.sampled_from([None, 1, 4, 60]),
    padded=st.booleans(),
    grads=st.booleans(),
)
def test_tokens_taken_back_leave_nothing(
    steps: list[tuple[int, int]], gates: int, capacity: int | None, padded: bool, grads: bool
) -> None:
    """Each step appends tokens and takes some back; the whole call lacks these."""
    layer = make(num_gates=gates, prune=-4.0)
    x = states(2, sum(count for count, _ in steps), layer, seed=len(steps))
    padding = torch.rand(x.shape[:2], generator=torch.Generator().manual_seed(3)) < 0.7
    cache, begin = ForgettingCache(capacity, rollback=ROLLBACK), 0
    outs, kept = [torch.empty(2, 0, EMBED)], [x[:, :0]]
    tokens = [padding[:, :0]]
    with torch.set_grad_enabled(grads):
        for count, back in steps:
            part, end = slice(begin, begin + count), count - min(count, back)
            out = layer(x[:, part], cache=cache, padding=padding[:, part] if padded else None)
            cache.truncate(cache.length - min(count, back))
            outs.append(out[:, :end])
            kept.append(x[:, part][:, :end])
            tokens.append(padding[:, part][:, :end])
            begin += count
        seen, seen_tokens = torch.cat(kept, 1), torch.cat(tokens, 1) if padded else None
        if capacity is None:
            whole = layer(seen, padding=seen_tokens)
        else:
            whole = layer(seen, padding=seen_tokens, cache=ForgettingCache(capacity))
    assert cache.length == seen.shape[1]
    torch.testing.assert_close(torch.cat(outs, 1), whole, atol=1e-5, rtol=1e-4)


def test_what_drafts_have_let_decay_is_held_for_the_rollback() -> None:
    layer = make(prune=-8.0)
    x = states(1, 700, layer)
    cache, begin = ForgettingCache(rollback=4), 0
    with torch.inference_mode():
        whole = layer(x)
        parts = []
        while begin < 700:
            parts.append(layer(x[:, begin : begin + 6], cache=cache)[:, :2])
            cache.truncate(begin + 2)
            assert cache.rows < 200
            begin += 2
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-4)


def test_gradients_of_a_stream_with_tokens_taken_back() -> None:
    layer = make(prune=-6.0)
    x = states(2, 45, layer).requires_grad_()
    drafts = states(2, 4, layer, seed=7)
    leaves = {"x": x, **dict(layer.named_parameters())}
    cache, parts = ForgettingCache(rollback=4), []
    for begin, end in ((0, 20), (20, 21), (21, 45)):
        parts.append(layer(x[:, begin:end], cache=cache))
        with torch.no_grad():
            layer(drafts, cache=cache)
        cache.truncate(end)
        with torch.no_grad():  # written over the drafts, or elsewhere outside of the graph
            layer(drafts[:, :1], cache=cache)
        cache.truncate(end)
    got, wanted = gathered(torch.cat(parts, 1), leaves), gathered(layer(x), leaves)
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, atol=2e-5, rtol=2e-4, msg=name)


@pytest.mark.parametrize("rollback", [0, 3])
def test_what_is_forgotten_is_not_taken_back(rollback: int) -> None:
    layer = make(prune=-6.0)
    x = states(2, 12, layer)
    cache = ForgettingCache(rollback=rollback)
    with torch.no_grad():
        layer(x[:, :9], cache=cache)
        rows, least = cache.rows, 9 - rollback
        text = (
            rf"length must be 0 or at least {least}, as of the 9 tokens that the cache has seen "
            rf"ForgettingCache\(rollback={rollback}\) can take back {rollback}, got 5"
        )
        with pytest.raises(ValueError, match=text):
            cache.truncate(5)
        for wrong in (-1, 10):
            with pytest.raises(ValueError, match=f"length must be from 0 to 9, got {wrong}"):
                cache.truncate(wrong)
        with pytest.raises(TypeError, match="length must be an integer"):
            cache.truncate(8.0)  # type: ignore[arg-type]
        assert (cache.length, cache.rows) == (9, rows)
        cache.truncate(least)
        torch.testing.assert_close(layer(x[:, least:], cache=cache), layer(x)[:, least:])
        cache.truncate(12 - rollback)
        if rollback:
            text = "length must be 0 or at least 9, as .* can take back 0, got 8"
            with pytest.raises(ValueError, match=text):
                cache.truncate(8)
        cache.truncate(0)
        torch.testing.assert_close(layer(x, cache=cache), layer(x))


CHANGES: dict[str, Callable[[ForgettingAttention, ForgettingCache], object]] = {
    "append": lambda layer, cache: layer(states(2, 3, layer), cache=cache),
    "reorder": lambda layer, cache: cache.reorder(torch.tensor([1, 0])),
    "truncate": lambda layer, cache: cache.truncate(cache.length - 1),
    "reset": lambda layer, cache: cache.reset(),
}


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_cache_is_not_changed_by_a_recomputation(change: str, use_reentrant: bool) -> None:
    layer, cache = make(), ForgettingCache(rollback=4)

    def call(x: Tensor) -> Tensor:
        with torch.no_grad():
            CHANGES[change](layer, cache)
        return x.sin().square()

    with torch.no_grad():
        layer(states(2, 9, layer), cache=cache)
    out = checkpoint(call, torch.ones(3, requires_grad=True), use_reentrant=use_reentrant)
    length = cache.length
    with pytest.raises(RuntimeError, match="a ForgettingCache cannot be changed during a backw"):
        out.sum().backward()
    assert cache.length == length


def stored(cache: ForgettingCache) -> ForgettingCache:
    state = torch_saved(cache.state_dict(), weights_only=True)
    loaded = ForgettingCache(cache.capacity, rollback=cache.rollback)
    loaded.load_state_dict(state)
    return loaded


COPIES: dict[str, Callable[[ForgettingCache], ForgettingCache]] = {
    "deepcopy": copy.deepcopy,
    "torch.save of weights": lambda cache: torch_saved(cache, weights_only=True),
    "state_dict": stored,
}


@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize("how", COPIES)
def test_copies_go_on_and_take_back(how: str, is_left: bool) -> None:
    layer = make(prune=-6.0)
    x = states(2, 30, layer)
    cache = ForgettingCache(rollback=6)
    with torch.inference_mode():
        layer(x[:, :20], cache=cache)
        copied = COPIES[how](cache)
    with torch.inference_mode(not is_left), torch.no_grad():
        layer(x[:, 25:], cache=copied)
        copied.truncate(22)
        assert (cache.length, copied.length) == (20, 22)
        layer(states(2, 1, layer, seed=3), cache=copied)
        copied = COPIES[how](copied)
        copied.truncate(20)
        got = [layer(x[:, i : i + 1], cache=copied) for i in range(20, 30)]
        torch.testing.assert_close(torch.cat(got, 1), layer(x)[:, 20:])


def test_a_saved_cache_is_of_one_rollback() -> None:
    layer = make(prune=-6.0)
    cache, other = ForgettingCache(rollback=3), ForgettingCache()
    with torch.no_grad():
        layer(states(2, 9, layer), cache=cache)
    state = cache.state_dict()
    text = r"state must have rollback=0, as this ForgettingCache, got 3"
    with pytest.raises(ValueError, match=text):
        other.load_state_dict(state)
    for sums in (state["sums"][..., :0], state["sums"].repeat(1, 1, 2), state["sums"][:1]):
        with pytest.raises(ValueError, match=r"sums of state must have shape \(2, 2, 4\), or a s"):
            cache.load_state_dict({**state, "sums": sums})
    with pytest.raises(ValueError, match="length of state must be at least 9, as key has, got 8"):
        cache.load_state_dict({**state, "length": 8})
    for name in ("key", "value"):
        with pytest.raises(TypeError, match=f"{name} must be of 16 to 64 floating-point bits, got"):
            cache.load_state_dict({**state, name: state[name].to(torch.float8_e5m2)})
    assert (cache.length, other.length) == (9, 0)


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
            with pytest.raises(ValueError, match="state must have the field 'sums'"):
                loaded.load_state_dict({n: t for n, t in state.items() if n != "sums"})
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


@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_training(checkpointed: bool) -> None:
    layer = make(prune=-6.0)
    x = states(2, 20, layer)

    def call(x: Tensor) -> Tensor:
        out: Tensor = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        return out

    torch._dynamo.reset()
    outs = torch.compile(call, backend="aot_eager", fullgraph=True)(x), layer(x)
    for one, other in zip(
        *(torch.autograd.grad(o.sum(), layer.parameters()) for o in outs), strict=True
    ):
        torch.testing.assert_close(one, other)


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
