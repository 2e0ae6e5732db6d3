# SPDX-License-Identifier: BSD-3-Clause
"""A Doge generates the same output with only the window's keys as with all keys."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_dmattn.record import KeyCounts

from .tiny_models import WINDOW, padding, tiny_model, tokens, transformers

cache_layers = pytest.importorskip("flash_dmattn.integrations.cache")

pytestmark = pytest.mark.skipif(
    not hasattr(transformers.DynamicCache, "activate_past_recording"),
    reason="this transformers takes drafts back without saying so first",
)

# Repeated tokens would cause ties; see `tokens`.
GREEDY = {"max_new_tokens": 30, "do_sample": False, "no_repeat_ngram_size": 1}
WAYS = {
    "greedy": GREEDY,
    "sampling": {**GREEDY, "do_sample": True, "top_k": 5},
    "beams": {**GREEDY, "num_beams": 3},
    "several beams": {**GREEDY, "num_beams": 4, "num_return_sequences": 2},
    "drafts of the prompt": {**GREEDY, "prompt_lookup_num_tokens": 3},
    "prefill in parts": {**GREEDY, "prefill_chunk_size": 7},
}


def generated(way: str, options: dict[str, Any], **inputs: Any) -> Any:
    torch.manual_seed(0)
    model = tiny_model("doge", way).eval()
    return model.generate(**inputs, **options, return_dict_in_generate=True)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", WAYS)
def test_ways_of_generating(name: str, padded: bool) -> None:
    mask = padding("left") if padded else torch.ones_like(padding("left"))
    inputs = {"inputs": tokens(), "attention_mask": mask}
    if name.startswith("drafts"):
        inputs = {key: value[:1] for key, value in inputs.items()}  # for single sequences only
    got = generated("applied", WAYS[name], **inputs)
    want = generated("eager", WAYS[name], **inputs)
    assert torch.equal(got.sequences, want.sequences)
    for layer in got.past_key_values.layers:
        assert isinstance(layer, cache_layers.KeptLayer)
        assert layer.kept.capacity == WINDOW


def test_drafts_of_another_model() -> None:
    inputs = {"inputs": tokens()[:1], "attention_mask": padding("right")[1:]}
    assistant = tiny_model("doge", "applied", layers=1).eval()
    # Accepted drafts and rejected ones.
    for draft in (assistant, tiny_model("doge", "applied").eval()):
        options = {**GREEDY, "assistant_model": copy.deepcopy(draft)}
        got = generated("applied", options, **inputs)
        assert torch.equal(got.sequences, generated("eager", GREEDY, **inputs).sequences)


def test_logits_in_parts_and_again() -> None:
    model, eager = tiny_model("doge", "applied").eval(), tiny_model("doge").eval()
    cache, outs, mask = transformers.DynamicCache(), [], padding("left")
    with torch.no_grad():
        want = eager(tokens(), attention_mask=mask).logits
        for start, end in ((0, 15), (15, 16), (16, 33), (33, 40)):
            part = {"attention_mask": mask[:, :end], "past_key_values": cache}
            outs.append(model(tokens()[:, start:end], **part).logits)
            assert cache.get_seq_length() == end
    got = torch.cat(outs, 1)
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], atol=2e-5, rtol=1e-4)
    cache.reset()
    with torch.no_grad():
        again = model(tokens(), attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(again[mask.bool()], want[mask.bool()], atol=2e-5, rtol=1e-4)


def test_caches_that_keep_all() -> None:
    """Gradients, masks beyond padding, and caches of other classes require all keys."""
    model = tiny_model("doge", "applied").eval()
    rows = torch.ones(2, 1, 40, 40, dtype=torch.bool).tril()
    caches = [transformers.DynamicCache() for _ in range(3)]
    model(tokens(), past_key_values=caches[0])
    with torch.no_grad():
        model(tokens(), attention_mask=rows, past_key_values=caches[1])
        caches[2] = transformers.StaticCache(config=model.config, max_cache_len=64)
        model(tokens(), past_key_values=caches[2])
    for cache in caches:
        assert not any(isinstance(layer, cache_layers.KeptLayer) for layer in cache.layers)


def test_what_was_forgotten_is_not_shown_again() -> None:
    model, cache = tiny_model("doge", "applied").eval(), transformers.DynamicCache()
    with torch.no_grad():
        model(tokens()[:, :39], past_key_values=cache)
        rows = torch.ones(2, 1, 1, 40, dtype=torch.bool)
        with pytest.raises(ValueError, match="the cache keeps only what later tokens can see"):
            model(tokens()[:, 39:], attention_mask=rows, past_key_values=cache)
    with pytest.raises(ValueError, match=r"tokens_to_remove must be from 0 to 0, .* got -1; call"):
        cache.crop(-1)


@torch.no_grad()
def test_tokens_are_taken_back_by_a_tensor_too() -> None:
    """Some versions of transformers count the accepted drafts on the device."""
    model, mask = tiny_model("doge", "applied").eval(), torch.ones(2, 40, dtype=torch.int64)
    cache = transformers.DynamicCache()
    cache.activate_past_recording()
    model(tokens()[:, :30], past_key_values=cache)
    cache.crop(torch.tensor(-3))
    assert type(cache.get_seq_length()) is int
    for place in range(27, 40):
        got = model(
            tokens()[:, place : place + 1],
            attention_mask=mask[:, : place + 1],
            past_key_values=cache,
        ).logits
        cache.crop(torch.tensor(0))
    want = model(tokens(), use_cache=False).logits[:, -1:]
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def heads_of(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return key and value, ``(B, Hk, N, D)``."""
    key, value = torch.randn(2, 2, 2, count, 8, generator=torch.Generator().manual_seed(seed))
    return key, value


def key_bias(value: Tensor) -> Tensor:
    return value.sum(-1).transpose(1, 2).unsqueeze(2)


def seen_by(layer: Any, key: Tensor, value: Tensor) -> Tensor:
    """Append tokens and return a number that depends on all kept tokens."""
    layer.prepare(key_bias, None)
    layer.update(key, value)
    number: Tensor = layer.keys.sin().sum() + layer.values.sin().sum() + layer.bias.exp().sum()
    return number


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("records", [False, True])
def test_training_around_calls_without_gradients(records: bool, mode: Any) -> None:
    first = [tensor.requires_grad_() for tensor in heads_of(6, 0)]

    def trained(between: Any) -> list[Tensor]:
        layer = cache_layers.KeptLayer(KeyCounts(4), for_doge=True)
        layer.record_past = records
        number = seen_by(layer, *first)
        with between():
            seen_by(layer, *heads_of(2, 1))
            layer.reorder_cache(torch.tensor([1, 0]))
            if records:
                layer.crop(-1)
            seen_by(layer, *heads_of(1, 2))
        return list(torch.autograd.grad(number + seen_by(layer, *heads_of(2, 3)), first))

    for got, want in zip(trained(mode), trained(torch.enable_grad), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("records", [False, True])
@torch.no_grad()
def test_a_refused_update_takes_nothing_in(records: bool) -> None:
    layer = cache_layers.KeptLayer(KeyCounts(4), for_doge=True)
    layer.record_past = records
    seen_by(layer, *heads_of(6, 0))
    with pytest.raises((RuntimeError, ValueError), match=r"size|shape"):
        seen_by(layer, *(tensor[:1] for tensor in heads_of(1, 1)))
    other = cache_layers.KeptLayer(KeyCounts(4), for_doge=True)
    other.record_past = records
    seen_by(other, *heads_of(6, 0))
    want = seen_by(other, *heads_of(2, 2))
    assert layer.get_seq_length() == 6
    torch.testing.assert_close(seen_by(layer, *heads_of(2, 2)), want)
    assert layer.get_seq_length() == 8
