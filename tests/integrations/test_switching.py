# SPDX-License-Identifier: BSD-3-Clause
"""A model's selection under another attention, and in saved files."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_dmattn.integrations import apply_flash_dmattn

from .tiny_models import LENGTH, WINDOW, inputs_of, padding, tiny_model, tokens, transformers

OTHERS = ("eager", "sdpa")


def biased_llama(window: int | None = WINDOW) -> Any:
    return apply_flash_dmattn(
        tiny_model("llama"), first_value, attention=llama_attention(), window_size=window
    )


def first_value(module: torch.nn.Module, value: Tensor) -> Tensor:
    return value[..., 0]


def llama_attention() -> type[torch.nn.Module]:
    return type(tiny_model("llama").model.layers[0].self_attn)


@pytest.mark.parametrize("case", ["whole", "left", "packed"])
@pytest.mark.parametrize("name", OTHERS)
def test_a_doge_computes_with_the_attention_it_is_given(name: str, case: str) -> None:
    model, inputs = tiny_model("doge", "applied").eval(), inputs_of(case)
    seen = inputs.get("attention_mask", torch.ones(2, LENGTH)).bool()
    eager = tiny_model("doge").eval()
    right = eager(tokens(), use_cache=False, **inputs).logits
    eager.set_attn_implementation(name)
    want = eager(tokens(), use_cache=False, **inputs).logits
    before = model(tokens(), use_cache=False, **inputs).logits
    # Some versions of transformers make no mask for the "sdpa" of a whole batch, and so lose
    # causality.
    is_right = torch.allclose(want[seen], right[seen], atol=1e-4, rtol=1e-4)
    for chosen in (name, "flash_dmattn", name, "flash_dmattn_key_bias"):
        model.set_attn_implementation(chosen)
        got = copy.deepcopy(model)(tokens(), use_cache=False, **inputs).logits
        if chosen == name:
            assert torch.equal(got, want)
        if is_right or chosen != name:
            torch.testing.assert_close(got[seen], before[seen], atol=2e-5, rtol=1e-4)


def test_a_doge_shows_its_probabilities_as_its_refusal_advises() -> None:
    model = tiny_model("doge", "applied").eval()
    with pytest.raises(NotImplementedError, match=r"call model.set_attn_implementation\('eager'\)"):
        model(tokens(), output_attentions=True)
    model.set_attn_implementation("eager")
    got = model(tokens(), output_attentions=True, use_cache=False)
    want = tiny_model("doge").eval()(tokens(), output_attentions=True, use_cache=False)
    assert len(got.attentions) == 2
    for one, other in zip(got.attentions, want.attentions, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", OTHERS)
def test_a_doge_generates_with_the_attention_it_is_given(name: str) -> None:
    model, eager = tiny_model("doge", "applied").eval(), tiny_model("doge").eval()
    options = {"attention_mask": padding("left"), "max_new_tokens": 10, "do_sample": False,
               "no_repeat_ngram_size": 1}  # fmt: skip
    for m in (model, eager):
        m.set_attn_implementation(name)
    assert torch.equal(model.generate(tokens(), **options), eager.generate(tokens(), **options))


@pytest.mark.skipif(
    not hasattr(transformers.DynamicCache, "activate_past_recording"),
    reason="with this transformers caches keep all keys",
)
@pytest.mark.parametrize("name", OTHERS)
def test_a_cache_is_read_by_other_attention_if_it_is_whole(name: str) -> None:
    """The cache holds all keys while they fit in the window."""
    mask = padding("left")
    for family, prompt in (("doge-without-selection", 30), ("doge", 30)):
        model, eager = tiny_model(family, "applied").eval(), tiny_model(family).eval()
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(tokens()[:, :prompt], attention_mask=mask[:, :prompt], past_key_values=cache)
            model.set_attn_implementation(name)
            rest = {"attention_mask": mask, "past_key_values": cache}
            if family == "doge":
                with pytest.raises(ValueError, match=rf"keeps {WINDOW} of 30 keys: .*'{name}' re"):
                    model(tokens()[:, prompt:], **rest)
                continue
            got = model(tokens()[:, prompt:], **rest).logits
            want = eager(tokens(), attention_mask=mask, use_cache=False).logits[:, prompt:]
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_a_key_bias_is_not_dropped_without_a_word(name: str) -> None:
    model = biased_llama().eval()
    want = model(tokens()).logits
    message = rf"attn_implementation='{name}' computes without the key_bias .* LlamaAttention: call"
    model.set_attn_implementation(name)
    for changed in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(NotImplementedError, match=message):
            changed(tokens())
        with pytest.raises(NotImplementedError, match=message):
            changed.generate(tokens(), max_new_tokens=2)
        changed.set_attn_implementation("flash_dmattn")
        assert torch.equal(changed(tokens()).logits, want)
    torch._dynamo.reset()
    model.set_attn_implementation(name)
    with pytest.raises(NotImplementedError, match=message):
        torch.compile(model, backend="eager")(tokens())


def test_a_refusal_does_not_advise_what_would_be_refused() -> None:
    with pytest.raises(NotImplementedError) as refused:
        biased_llama()(tokens(), output_attentions=True)
    assert "eager" not in str(refused.value)
    assert "no other attention computes with this model's key_bias" in str(refused.value)


def test_continuous_batching_is_refused_with_a_key_bias_under_any_name() -> None:
    if not hasattr(transformers, "ContinuousBatchingManager"):
        pytest.skip("this transformers has no continuous batching")
    model = biased_llama().eval()
    for name in ("flash_dmattn", "sdpa"):
        model.set_attn_implementation(name)
        with pytest.raises(
            NotImplementedError, match=r"continuous batching .* of generate_batch\(\)$"
        ):
            model.generate_batch(
                inputs=[[3, 4, 5], [6, 7]],
                generation_config=transformers.GenerationConfig(
                    max_new_tokens=2, do_sample=False, eos_token_id=2, pad_token_id=0
                ),
            )


def saved(model: Any, folder: Path) -> list[str]:
    """Save a model and return the warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.save_pretrained(folder)
    return [str(warning.message) for warning in said if "flash_dmattn" in str(warning.message)]


def test_saving_says_what_files_do_not_hold(tmp_path: Path) -> None:
    (said,) = saved(biased_llama(), tmp_path)
    assert "does not store the key_bias and window_size=8 of apply_flash_dmattn: call" in said
    (said,) = saved(copy.deepcopy(biased_llama(None)), tmp_path)
    assert "does not store the key_bias of apply_flash_dmattn" in said
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    again = apply_flash_dmattn(loaded, first_value, attention=llama_attention(), window_size=WINDOW)
    torch.testing.assert_close(again(tokens()).logits, biased_llama()(tokens()).logits)

    doge = apply_flash_dmattn(tiny_model("doge"), window_size=5)
    (said,) = saved(doge, tmp_path)
    assert "does not store the window_size=5 of apply_flash_dmattn" in said
    # The file holds the settings of the config.
    for whole in (tiny_model("doge", "applied"), apply_flash_dmattn(doge, window_size=WINDOW)):
        assert saved(whole, tmp_path) == []
    assert saved(tiny_model("llama", "named"), tmp_path) == []


def loaded(folder: Path, **options: Any) -> tuple[Any, list[str]]:
    """Load a model and return the warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    return model, [str(warning.message) for warning in said if "flash_dmattn" in str(warning)]


@pytest.mark.parametrize("options", [{}, {"attn_implementation": "flash_dmattn"}])
def test_loading_says_what_files_do_not_hold(options: dict[str, Any], tmp_path: Path) -> None:
    model = biased_llama()
    saved(model, tmp_path)
    assert not hasattr(model.config, "needs_apply_flash_dmattn")
    again, (said,) = loaded(tmp_path, **options)
    text = "this model was saved without the key_bias and window_size=8 that it computed with: call"
    assert text in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_flash_dmattn(again, first_value, attention=llama_attention(), window_size=WINDOW)
    torch.testing.assert_close(again(tokens()).logits, model(tokens()).logits)
    # A model that is saved again without its bias still needs it.
    plain, _ = loaded(tmp_path, **options)
    assert saved(plain, tmp_path) == []
    assert len(loaded(tmp_path, **options)[1]) == 1
    saved(apply_flash_dmattn(tiny_model("doge"), window_size=5), tmp_path)
    assert "saved without the window_size=5" in loaded(tmp_path)[1][0]
    saved(tiny_model("doge", "applied"), tmp_path)
    assert loaded(tmp_path)[1] == []


class Adapted(torch.nn.Module):
    """A stand-in with PEFT's names for the parts of a wrapped model."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.base_model = torch.nn.ModuleDict({"model": model})


def test_adapters_say_what_their_files_do_not_hold() -> None:
    """PEFT saves a part of the state dict and calls no method of the model."""
    with pytest.warns(UserWarning, match=r"^PEFT does not store the key_bias and window_size=8 of"):
        Adapted(biased_llama()).state_dict()
    with pytest.warns(UserWarning, match=r"^PEFT does not store the window_size=5 of"):
        Adapted(apply_flash_dmattn(tiny_model("doge"), window_size=5)).state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Adapted(tiny_model("doge", "applied")).state_dict()
        biased_llama().state_dict()
