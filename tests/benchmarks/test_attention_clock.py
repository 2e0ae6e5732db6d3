# SPDX-License-Identifier: BSD-3-Clause
"""The attention clock measures a model's time in attention and leaves nothing changed."""

from __future__ import annotations

import re
from collections import Counter
from itertools import chain
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402
from transformers.models.doge import modeling_doge  # noqa: E402

from benchmarks import generate  # noqa: E402
from benchmarks.attention_clock import AttentionClock, Span  # noqa: E402

LAYERS, LENGTH, NEW_TOKENS = 2, 24, 3
SETTING = generate.Setting(
    generate.Case("a", heads=2, kv_heads=1, head_dim=8, length=LENGTH, window=4),
    new_tokens=NEW_TOKENS,
    layers=LAYERS,
    repeats=1,
)


class Events:
    """A clock whose time is the number of recorded events."""

    def __init__(self) -> None:
        self.happened: list[str] = []

    def now(self) -> int:
        return len(self.happened)

    def within(self, span: Span) -> list[str]:
        return self.happened[span.start : span.stop]


@pytest.fixture(params=generate.METHODS)
def model(request: pytest.FixtureRequest) -> Any:
    return generate.make_model(SETTING, generate.METHODS[request.param])


def generated(model: Any) -> Any:
    prompt = generate.make_prompt(SETTING.shape)
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
    )


def test_every_layer_of_every_call_is_timed(model: Any) -> None:
    clock = AttentionClock()
    with clock.watching(model):
        for _ in range(2):
            clock.restart()
            generated(model)
    assert Counter((span.phase, span.kind) for span in clock.spans) == {
        ("prefill", "mask"): 1,
        ("prefill", "layer"): LAYERS,
        ("prefill", "model"): 1,
        ("decode", "mask"): NEW_TOKENS - 1,
        ("decode", "layer"): LAYERS * (NEW_TOKENS - 1),
        ("decode", "model"): NEW_TOKENS - 1,
    }
    # The spans of one forward pass do not overlap; the span of the whole model contains them.
    for _ in range(NEW_TOKENS):
        *parts, whole = clock.spans[: LAYERS + 2]
        del clock.spans[: LAYERS + 2]
        assert [span.kind for span in (*parts, whole)] == ["mask", *["layer"] * LAYERS, "model"]
        moments = [whole.start, *(m for span in parts for m in (span.start, span.stop)), whole.stop]
        assert moments == sorted(moments)


def test_attention_takes_less_than_the_model(model: Any) -> None:
    clock = AttentionClock()
    with clock.watching(model):
        generated(model)
    seconds = clock.seconds()
    for phase in ("prefill", "decode"):
        assert 0 < seconds[f"{phase}_attention"] < seconds[phase]
    parts = ("prefill_attention", "decode_attention")
    assert seconds["attention"] == sum(seconds[part] for part in parts)
    assert seconds["generate"] == seconds["prefill"] + seconds["decode"]


def test_no_part_of_a_layer_before_the_mask_or_after_attention_is_timed(model: Any) -> None:
    events = Events()
    for layer in model.model.layers:
        for name, part in layer.named_modules():
            if not list(part.children()):
                part.register_forward_hook(lambda *_, name=name: events.happened.append(name))
    clock = AttentionClock(events.now)
    with clock.watching(model):
        generated(model)
    assert {"self_attn.q_proj", "self_attn.dt_proj", "self_attn.k_norm", "self_attn.o_proj"} <= set(
        events.happened
    )
    parts = [span for span in clock.spans if span.kind != "model"]
    assert len(parts) == NEW_TOKENS * (LAYERS + 1)
    assert [events.within(span) for span in parts] == [[]] * len(parts)
    wholes = [events.within(span) for span in clock.spans if span.kind == "model"]
    assert [*chain(*wholes)] == events.happened


def test_masks_and_the_attention_function_are_timed(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mask creation and attention each run within their own span, in any method."""
    events = Events()

    def noted(name: str, function: Any) -> Any:
        def noting(*args: Any, **kwargs: Any) -> Any:
            events.happened.append(name)
            return function(*args, **kwargs)

        return noting

    name = model.config._attn_implementation
    if name == "eager":
        eager = noted("attention", modeling_doge.eager_attention_forward)
        monkeypatch.setattr(modeling_doge, "eager_attention_forward", eager)
    else:
        attention = noted("attention", AttentionInterface()[name])
        monkeypatch.setitem(AttentionInterface._global_mapping, name, attention)
    mask = noted("mask", AttentionMaskInterface()[name])
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, mask)
    for layer in model.model.layers:
        prepare = noted("prepare", layer.self_attn.prepare_dynamic_mask)
        monkeypatch.setattr(layer.self_attn, "prepare_dynamic_mask", prepare)
    repeat = noted("repeat", modeling_doge.repeat_kv)
    monkeypatch.setattr(modeling_doge, "repeat_kv", repeat)

    clock = AttentionClock(events.now)
    with clock.watching(model):
        generated(model)
    parts = [events.within(span) for span in clock.spans if span.kind != "model"]
    layer = ["prepare", "repeat", "attention"]
    if name == "eager":
        layer += ["repeat", "repeat"]  # of keys and values to the query heads
    assert parts == NEW_TOKENS * [["mask"], *[layer] * LAYERS]
    assert [*chain(*parts)] == events.happened


def test_watching_changes_no_token_and_leaves_nothing_behind(model: Any) -> None:
    interface = modeling_doge.ALL_ATTENTION_FUNCTIONS

    def state() -> dict[str, Any]:
        """Return everything that a clock could leave changed."""
        registries = (AttentionInterface, AttentionMaskInterface)
        return {
            "module": dict(vars(modeling_doge)),
            "class": dict(vars(modeling_doge.DogeAttention)),
            "registries": [dict(registry._global_mapping) for registry in registries],
            "local": dict(interface._local_mapping),
            "layers": [dict(vars(layer.self_attn)) for layer in model.model.layers],
            "hooks": [len(model._forward_hooks), len(model._forward_pre_hooks)],
        }

    before, expected = state(), generated(model)
    clock = AttentionClock()
    with clock.watching(model):
        assert state() != before
        watched = generated(model)
    assert torch.equal(watched, expected)
    assert state() == before
    seen = list(clock.spans)
    assert torch.equal(generated(model), expected)
    assert clock.spans == seen

    with pytest.raises(ZeroDivisionError), clock.watching(model):
        raise ZeroDivisionError
    assert state() == before


def test_other_models_are_not_timed(model: Any) -> None:
    other = generate.make_model(SETTING, generate.METHODS["sdpa"])
    clock = AttentionClock()
    with clock.watching(model):
        generated(other)
        assert clock.spans == []
        generated(model)
    assert len(clock.spans) == NEW_TOKENS * (LAYERS + 2)


@pytest.mark.parametrize("kind, count", [("mask", 3), ("layer", 6)])
def test_calls_that_nobody_saw_are_missed(kind: str, count: int) -> None:
    model = generate.make_model(SETTING, generate.METHODS["eager"])
    clock = AttentionClock()
    with clock.watching(model):
        generated(model)
    clock.spans.remove(next(span for span in clock.spans if span.kind == kind))
    text = (
        f"attention was timed {count - 1} times by {kind}, not {count} times, in 3 forward passes: "
        "this version of transformers calls it otherwise"
    )
    with pytest.raises(RuntimeError, match=re.escape(text)):
        clock.seconds()
