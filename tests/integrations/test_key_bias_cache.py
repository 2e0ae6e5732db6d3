# SPDX-License-Identifier: BSD-3-Clause
"""A model with a key_bias generates the same with only its visible keys as with all keys."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_dmattn.integrations import apply_flash_dmattn

from .tiny_models import LENGTH, padding, tiny_model, tokens, transformers

cache_layers = pytest.importorskip("flash_dmattn.integrations.cache")

pytestmark = pytest.mark.skipif(
    not hasattr(transformers.DynamicCache, "activate_past_recording"),
    reason="this transformers takes drafts back without saying so first",
)

COUNTS = {
    "window": {"window_size": 6},
    "window and last": {"window_size": 4, "keep_last": 5},
    "all three": {"window_size": 3, "keep_last": 4, "keep_first": 2},
    "no window": {"window_size": 0, "keep_last": 7, "keep_first": 1},
}
GREEDY = {"max_new_tokens": 20, "do_sample": False, "no_repeat_ngram_size": 1}
WAYS = {
    "greedy": GREEDY,
    "sampling": {**GREEDY, "do_sample": True, "top_k": 5},
    "beams": {**GREEDY, "num_beams": 3},
    "several beams": {**GREEDY, "num_beams": 4, "num_return_sequences": 2},
    "drafts of the prompt": {**GREEDY, "prompt_lookup_num_tokens": 3},
    "prefill in parts": {**GREEDY, "prefill_chunk_size": 7},
}


def first_value(module: torch.nn.Module, value: Tensor) -> Tensor:
    """Return a number for each token, -inf for some of them."""
    first = value[..., 0]
    return first.masked_fill(first > 1.5, -torch.inf)


def of_one_head(module: torch.nn.Module, value: Tensor) -> Tensor:
    return value.sum((1, 3), keepdim=True).transpose(2, 3)


def of_tokens(module: torch.nn.Module, value: Tensor) -> Tensor:
    return value.sum((1, 3))


def of_query_heads(module: torch.nn.Module, value: Tensor) -> Tensor:
    return torch.cat([value[..., 0], value[..., 1]], 1)[:, [0, 2, 1, 3]]


def by_place(module: torch.nn.Module, value: Tensor) -> Tensor:
    return 0.01 * torch.arange(value.shape[2]).expand(value.shape[:3]) + value[..., 0]


def normalised(module: torch.nn.Module, value: Tensor) -> Tensor:
    return (value[..., 0] - value[..., 0].mean(2, keepdim=True)).double()


def biased(function: Any = first_value, family: str = "llama", **options: Any) -> Any:
    model = tiny_model(family)
    kind = type(model.model.layers[0].self_attn)
    return apply_flash_dmattn(model, function, attention=kind, **options).eval()


def in_steps(model: Any, ids: Tensor, mask: Tensor | None, cache: Any, first: int = 10) -> Tensor:
    steps = []
    for start, end in [(0, first), *((i, i + 1) for i in range(first, ids.shape[1]))]:
        seen = None if mask is None else mask[:, :end]
        given = {"attention_mask": seen, "past_key_values": cache, "use_cache": True}
        steps.append(model(ids[:, start:end], **given).logits)
    return torch.cat(steps, 1)


@pytest.mark.parametrize("function", [first_value, of_one_head, of_tokens, of_query_heads])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("case", COUNTS)
@torch.no_grad()
def test_steps_equal_one_call_in_constant_memory(case: str, padded: bool, function: Any) -> None:
    counts = COUNTS[case]
    model = biased(function, **counts)
    mask = padding("left").long() if padded else None
    cache = transformers.DynamicCache(config=model.config)
    got = in_steps(model, tokens(), mask, cache)
    want = model(tokens(), attention_mask=mask, use_cache=False).logits
    kept = torch.ones_like(tokens()).bool() if mask is None else mask.bool()
    torch.testing.assert_close(got[kept], want[kept], atol=2e-5, rtol=1e-4)
    heads = 1 if function is not of_query_heads else 2  # heads that share a key
    rows = counts["window_size"] * heads + sum(counts.values()) - counts["window_size"]
    for layer in cache.layers:
        assert isinstance(layer, cache_layers.KeptLayer)
        assert layer.get_seq_length() == LENGTH
        assert layer.kept.capacity == rows < LENGTH


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("how", WAYS)
def test_generating_says_the_same(how: str, padded: bool) -> None:
    rows = slice(1, 2) if "drafts" in how else slice(None)
    mask = padding("left") if padded else torch.ones(2, LENGTH)
    inputs = {"inputs": tokens()[rows], "attention_mask": mask[rows].long(), **WAYS[how]}
    outputs = []
    for every_key in (False, True):
        torch.manual_seed(0)
        model = biased(**COUNTS["all three"], every_key=every_key)
        outputs.append(model.generate(**inputs, return_dict_in_generate=True))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    kinds = [{type(layer) for layer in out.past_key_values.layers} for out in outputs]
    assert kinds == [{cache_layers.KeptLayer}, {transformers.cache_utils.DynamicLayer}]


@torch.no_grad()
def test_a_prompt_of_one_token() -> None:
    model = biased(window_size=4, keep_last=3)
    got = in_steps(model, tokens(), None, transformers.DynamicCache(), first=1)
    want = model(tokens(), use_cache=False).logits
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("function", [first_value, of_one_head, of_query_heads])
@torch.no_grad()
def test_a_cache_of_which_all_is_taken_back(function: Any) -> None:
    model, cache = biased(function, window_size=4), transformers.DynamicCache()
    cache.activate_past_recording()
    model(tokens()[:, :3], past_key_values=cache)
    for layer in cache.layers:
        layer.crop(-3)
    got = in_steps(model, tokens(), None, cache)
    want = model(tokens(), use_cache=False).logits
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    "function, error, text",
    [
        (lambda module, value: [1], TypeError, "be a torch.Tensor, got list of leng"),
        (lambda module, value: value[..., 0] > 0, TypeError, "hold real numbers, got torch.bool"),
        (lambda module, value: value, ValueError, rf"have shape .* got \(2, 2, {LENGTH}, "),
        (lambda module, value: value[:, :, -1:, 0], ValueError, rf".* K={LENGTH}, got \(2, 2, 1,"),
        (
            lambda module, value: torch.cat([value, value], 1)[:, :3, :, 0],
            ValueError,
            rf".* Hk=2, K={LENGTH}, got \(2, 3, 1, {LENGTH}\)",
        ),
    ],
)  # fmt: skip
@torch.no_grad()
def test_wrong_results(function: Any, error: type[Exception], text: str, cached: bool) -> None:
    model = biased(function, window_size=4)
    with pytest.raises(error, match="^the result of key_bias must " + text):
        model(tokens(), use_cache=cached)


@torch.no_grad()
def test_integers_are_biases() -> None:
    model = biased(lambda module, value: (4 * value[..., 0]).long(), window_size=4)
    got = in_steps(model, tokens(), padding("left").long(), transformers.DynamicCache())
    want = model(tokens(), attention_mask=padding("left").long(), use_cache=False).logits
    kept = padding("left")
    torch.testing.assert_close(got[kept], want[kept], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("first", [1, 10])
@pytest.mark.parametrize("function", [by_place, normalised])
@torch.no_grad()
def test_a_bias_that_depends_on_other_tokens_needs_every_key(function: Any, first: int) -> None:
    model = biased(function, window_size=4, keep_last=3)
    text = "key_bias must give each token a bias by its own value, .* with every_key=True"
    with pytest.raises(ValueError, match=text):
        in_steps(model, tokens(), None, transformers.DynamicCache(), first)
    model(tokens(), use_cache=False)
    model = biased(by_place, window_size=4, keep_last=3, every_key=True)
    got = in_steps(model, tokens(), None, transformers.DynamicCache(), first)
    want = model(tokens(), use_cache=False).logits
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def test_gradients_need_every_key() -> None:
    model, cache = biased(window_size=4, keep_last=3), transformers.DynamicCache()
    model(tokens()[:, :20], past_key_values=cache)
    assert type(cache.layers[0]) is transformers.cache_utils.DynamicLayer
    got = model(tokens()[:, 20:], past_key_values=cache).logits
    want = model(tokens(), use_cache=False).logits[:, 20:]
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
    with torch.no_grad():
        cache = transformers.DynamicCache()
        model(tokens()[:, :20], past_key_values=cache)
    text = "keeps only what key_bias lets later tokens see: with gradients the biases of all"
    with pytest.raises(ValueError, match=text):
        model(tokens()[:, 20:], past_key_values=cache)
    assert cache.get_seq_length() == 20


@torch.no_grad()
def test_a_cache_is_of_one_choice() -> None:
    model, cache = biased(window_size=4, keep_last=3), transformers.DynamicCache()
    model(tokens()[:, :20], past_key_values=cache)
    for other, text in (
        (biased(window_size=5, keep_last=3), "a window of 5 sees more; begin with a new cache"),
        (biased(window_size=4), "keep_last=0 and keep_first=0 see others; begin with a new"),
    ):
        with pytest.raises(ValueError, match=text):
            other(tokens()[:, 20:21], past_key_values=cache)
    with pytest.raises(ValueError, match="was filled by a model of apply_flash_dmattn"):
        tiny_model("llama", "named").eval()(tokens()[:, 20:21], past_key_values=cache)
    got = model(tokens()[:, 20:], past_key_values=cache).logits
    want = model(tokens(), use_cache=False).logits[:, 20:]
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_other_masks_and_sliding_windows_keep_every_key() -> None:
    mistral = biased(family="mistral", window_size=4, keep_last=3)
    for cache in (transformers.DynamicCache(config=mistral.config), transformers.DynamicCache()):
        mistral(tokens()[:, :20], past_key_values=cache)
        assert not any(isinstance(layer, cache_layers.KeptLayer) for layer in cache.layers)
    model, cache = biased(window_size=4, keep_last=3), transformers.DynamicCache()
    rows = torch.ones(2, 1, 20, 20, dtype=torch.bool).tril()
    model(tokens()[:, :20], attention_mask=rows, past_key_values=cache)
    assert type(cache.layers[0]) is transformers.cache_utils.DynamicLayer


def change_forward(model: Any, forward: Any) -> None:
    for layer in model.model.layers:
        kind = type(layer.self_attn)
        layer.self_attn.__class__ = type("Changed", (kind,), {"forward": forward(kind)})


@torch.no_grad()
def test_a_module_that_hands_nothing_on_is_refused() -> None:
    def without(kind: Any) -> Any:
        def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
            kwargs.pop("flash_dmattn_call", None)
            return kind.forward(self, hidden_states, **kwargs)

        return forward

    model = biased(window_size=4, keep_last=3)
    change_forward(model, without)
    text = "Changed does not hand on its keyword arguments to attention; .* with every_key=True"
    with pytest.raises(NotImplementedError, match=text):
        model(tokens(), past_key_values=transformers.DynamicCache())


@torch.no_grad()
def test_a_module_with_another_bias_is_refused() -> None:
    def with_more(kind: Any) -> Any:
        def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
            more = torch.zeros(1, 1, 1, LENGTH)
            return kind.forward(self, hidden_states, **kwargs, position_bias=more)

        return forward

    model = biased(window_size=4, keep_last=3)
    change_forward(model, with_more)
    with pytest.raises(NotImplementedError, match="Changed adds another bias; the cache keeps"):
        model(tokens(), past_key_values=transformers.DynamicCache())


@torch.no_grad()
def test_a_copy_goes_on() -> None:
    model, cache = biased(window_size=4, keep_last=3), transformers.DynamicCache()
    model(tokens()[:, :20], past_key_values=cache)
    model, cache = copy.deepcopy(model), copy.deepcopy(cache)
    got = model(tokens()[:, 20:], past_key_values=cache).logits
    want = model(tokens(), use_cache=False).logits[:, 20:]
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def test_every_key_is_of_a_key_bias() -> None:
    with pytest.raises(ValueError, match="every_key must be False without key_bias"):
        apply_flash_dmattn(tiny_model("doge"), every_key=True)
