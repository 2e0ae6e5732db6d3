# SPDX-License-Identifier: BSD-3-Clause
"""Caches of a Doge that are resized, reset, trained on, or passed to another call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_dmattn.integrations import apply_flash_dmattn

from .tiny_models import LENGTH, WINDOW, padding, tiny_model, tokens, transformers

cache_layers = pytest.importorskip("flash_dmattn.integrations.cache")

pytestmark = pytest.mark.skipif(
    not hasattr(transformers.DynamicCache, "activate_past_recording"),
    reason="this transformers takes drafts back without saying so first",
)

PROMPT = 25
REPEAT, SELECT = "batch_repeat_interleave", "batch_select_indices"


def is_kept(cache: Any) -> bool:
    return all(isinstance(layer, cache_layers.KeptLayer) for layer in cache.layers)


def assert_close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        [(REPEAT, 2), (REPEAT, 2)],
        [(REPEAT, 2), (SELECT, [3, 0, 1])],
        [(SELECT, [1]), (REPEAT, 4)],
        [(SELECT, [1, 0]), (SELECT, [1, 1, 0]), (REPEAT, 2)],
        [("reorder_cache", [1, 0]), ("reorder_cache", [1, 1]), (SELECT, [0])],
    ],
    ids=lambda changes: "-".join(name.split("_")[1] for name, _ in changes),
)
def test_changed_several_times_between_two_calls(changes: list[Any], records: bool) -> None:
    """The reference is a model without a cache on the remaining rows."""
    model, rows = tiny_model("doge", "applied").eval(), torch.arange(2)
    cache = transformers.DynamicCache(config=model.config)
    if records:
        cache.activate_past_recording()
    with torch.no_grad():
        model(tokens()[:, :PROMPT], past_key_values=cache)
        for name, value in changes:
            getattr(cache, name)(value if name == REPEAT else torch.tensor(value))
            rows = rows.repeat_interleave(value) if name == REPEAT else rows[value]
        assert is_kept(cache)
        got = model(tokens()[rows, PROMPT:], past_key_values=cache).logits
        want = model(tokens()[rows], use_cache=False).logits[:, PROMPT:]
    assert_close(got, want)


@pytest.mark.parametrize("change", [lambda c: c.batch_repeat_interleave(3), lambda c: c.reset()])
def test_an_empty_cache_can_be_changed(change: Any) -> None:
    model, cache = tiny_model("doge", "applied").eval(), transformers.DynamicCache()
    with torch.no_grad():
        model(tokens(), past_key_values=cache)
        cache.reset()
        change(cache)
        assert cache.get_seq_length() == 0
        assert_close(model(tokens(), past_key_values=cache).logits, model(tokens()).logits)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_reset_and_another_batch(batch: int) -> None:
    model = tiny_model("doge", "applied").eval()
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(2), past_key_values=cache)
        cache.reset()
        got = [model(tokens(batch)[:, :PROMPT], past_key_values=cache).logits]
        got.append(model(tokens(batch)[:, PROMPT:], past_key_values=cache).logits)
        assert cache.get_seq_length() == LENGTH
        assert is_kept(cache)
        assert_close(torch.cat(got, 1), model(tokens(batch), use_cache=False).logits)


def test_reset_and_a_mask_or_a_window_or_gradients_that_need_all_keys() -> None:
    model = tiny_model("doge", "applied").eval()
    wider = apply_flash_dmattn(tiny_model("doge"), window_size=WINDOW + 4).eval()
    rows = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    for other, inputs, gradients in (
        (model, {"attention_mask": rows}, False), (wider, {}, False), (model, {}, True)
    ):  # fmt: skip
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(tokens(), past_key_values=cache)
            want = other(tokens(), use_cache=False, **inputs).logits
        cache.reset()
        with torch.set_grad_enabled(gradients):
            got = other(tokens(), past_key_values=cache, **inputs).logits
        assert_close(got.detach(), want)


def test_reset_of_a_cache_that_kept_all() -> None:
    model, cache = tiny_model("doge", "applied").eval(), transformers.DynamicCache()
    model(tokens(), past_key_values=cache)
    assert not is_kept(cache)
    cache.reset()
    if cache.get_seq_length():
        pytest.skip("reset() of this transformers leaves as many zeros, whatever the model")
    with torch.no_grad():
        got = model(tokens(), past_key_values=cache).logits
        assert is_kept(cache)
        assert_close(got, model(tokens(), use_cache=False).logits)


def test_a_wider_window_is_not_shown_what_was_forgotten() -> None:
    model, cache = tiny_model("doge", "applied").eval(), transformers.DynamicCache()
    with torch.no_grad():
        model(tokens()[:, :PROMPT], past_key_values=cache)
        apply_flash_dmattn(model, window_size=WINDOW + 1)
        with pytest.raises(ValueError, match=rf"keeps {WINDOW} of {PROMPT} keys: a window of 9 se"):
            model(tokens()[:, PROMPT:], past_key_values=cache)


def test_a_cache_is_no_other_models() -> None:
    cache = transformers.DynamicCache()
    with torch.no_grad():
        tiny_model("doge", "applied").eval()(tokens()[:, :PROMPT], past_key_values=cache)
        for model in (tiny_model("doge", "named"), tiny_model("doge"), tiny_model("llama")):
            with pytest.raises(
                ValueError, match="past_key_values was filled by a model of apply_f"
            ):
                model.eval()(tokens()[:, PROMPT:], past_key_values=cache)


def test_training_behind_a_prompt_of_inference_mode() -> None:
    model, eager = (tiny_model("doge-without-selection", way) for way in ("applied", "eager"))
    cache = transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        model(tokens()[:, :20], past_key_values=cache)
        model(tokens()[:, 20:21], past_key_values=cache)
    got = model(tokens()[:, 21:], past_key_values=cache).logits
    got.square().mean().backward()
    want = eager(tokens(), use_cache=False).logits[:, 21:]
    assert_close(got, want)
    assert all(p.grad is not None for p in model.parameters())


def step(model: Any, parts: list[int], inputs: dict[str, Tensor], **options: Any) -> dict[str, Any]:
    """Process the first tokens without gradients, train on the rest; return loss and gradients."""
    cache, begin = transformers.DynamicCache(config=model.config), 0
    if options.get("records"):
        cache.activate_past_recording()
    mask = inputs["attention_mask"]
    loss = torch.zeros(())
    for n, part in enumerate(parts):
        end = begin + part
        given = {"attention_mask": mask[:, :end], "past_key_values": cache}
        with torch.set_grad_enabled(n >= len(parts) - options.get("trained", 1)):
            logits = model(tokens()[:, begin:end], **given).logits
        loss = loss + logits[mask[:, begin:end].bool()].square().sum() / 1000
        begin = end
    loss.backward()
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **named}


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("side", ["left", "right", "none"])
@pytest.mark.parametrize("parts", [[25, 15], [20, 5, 1, 14], [3, 37]], ids=str)
def test_training_behind_a_prompt_without_gradients(
    parts: list[int], side: str, records: bool
) -> None:
    mask = torch.ones(2, LENGTH, dtype=torch.long) if side == "none" else padding(side)
    given = {"attention_mask": mask}
    got = step(tiny_model("doge-without-selection", "applied"), parts, given, records=records)
    want = step(tiny_model("doge-without-selection"), parts, given)
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, want[name], atol=1e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("trained", [1, 2])
def test_training_with_frozen_biases_needs_what_is_kept(trained: int) -> None:
    """With frozen biases, all earlier keys are constants."""
    parts, given = [20, 12, 8], {"attention_mask": padding("left")}
    results = []
    for every in (False, True):
        model = tiny_model("doge", "applied")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" in name or "k_proj" in name)
        if every:  # the result of a cache of all keys, which a mask with rows requires
            rows = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril() & (
                padding("left")[:, None, None].bool()
            )
            cache, begin, loss = transformers.DynamicCache(), 0, torch.zeros(())
            for n, part in enumerate(parts):
                end = begin + part
                with torch.set_grad_enabled(n >= len(parts) - trained):
                    logits = model(
                        tokens()[:, begin:end],
                        attention_mask=rows[:, :, begin:end, :end],
                        position_ids=torch.arange(begin, end)[None],
                        past_key_values=cache,
                    ).logits
                chosen = padding("left")[:, begin:end].bool()
                loss = loss + logits[chosen].square().sum() / 1000
                begin = end
            loss.backward()
            grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            results.append({"loss": loss.detach(), **grads})
        else:
            results.append(step(model, parts, given, trained=trained))
    got, want = results
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, want[name], atol=1e-5, rtol=1e-3, msg=name)


def test_training_behind_forgotten_keys_is_refused() -> None:
    model = tiny_model("doge", "applied")
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens()[:, :PROMPT], past_key_values=cache)
    message = rf"past_key_values keeps {WINDOW} of {PROMPT} keys: in training .* torch.no_grad\(\)"
    with pytest.raises(ValueError, match=message):
        model(tokens()[:, PROMPT:], past_key_values=cache)
    # The refused call must not change the cache.
    with torch.no_grad():
        got = model(tokens()[:, PROMPT:], past_key_values=cache).logits
        assert_close(got, model(tokens(), use_cache=False).logits[:, PROMPT:])


class EveryKey(transformers.DynamicCache):
    """A subclass, as the message of the refusal advises."""


def test_a_cache_of_another_class_keeps_every_key() -> None:
    results = []
    for way in ("applied", "eager"):
        model, cache = tiny_model("doge", way), EveryKey()
        with torch.no_grad():
            model(tokens()[:, :PROMPT], past_key_values=cache)
        logits = model(tokens()[:, PROMPT:], past_key_values=cache).logits
        logits.square().mean().backward()
        results.append([logits.detach(), *(p.grad for p in model.parameters())])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-3)


def test_steps_without_gradients_do_not_write_into_a_graph() -> None:
    """A later step must not overwrite tensors that a training step saved for its backward pass."""
    outputs = []
    for disturbed in (False, True):
        model = tiny_model("doge", "applied")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" in name or "k_proj" in name)
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(tokens()[:, :20], past_key_values=cache)
        model(tokens()[:, 20:30], past_key_values=cache)
        loss = model(tokens()[:, 30:36], past_key_values=cache).logits.square().mean()
        if disturbed:
            with torch.no_grad():
                for n in range(36, LENGTH):
                    model(tokens()[:, n : n + 1], past_key_values=cache)
        loss.backward()
        outputs.append([p.grad for p in model.parameters() if p.requires_grad])
    for got, want in zip(*outputs, strict=True):
        assert torch.equal(got, want)


def test_a_copied_cache_goes_its_own_way() -> None:
    model, cache = tiny_model("doge", "applied").eval(), transformers.DynamicCache()
    with torch.no_grad():
        model(tokens()[:, :PROMPT], past_key_values=cache)
        twin = copy.deepcopy(cache)
        twin.batch_repeat_interleave(2)
        twin.reset()
        got = model(tokens()[:, PROMPT:], past_key_values=cache).logits
        assert_close(got, model(tokens(), use_cache=False).logits[:, PROMPT:])
