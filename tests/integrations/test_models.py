# SPDX-License-Identifier: BSD-3-Clause
"""Whole models with attn_implementation="flash_dmattn" are as accurate as with eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_dmattn.integrations import implementations, register
from support import Target

from .tiny_models import (
    VOCABULARY,
    WAYS,
    assert_as_accurate_as_eager,
    calls_functions,
    inputs_of,
    results,
    tiny_model,
    tokens,
    transformers,
)


def dtypes_of(target: Target) -> list[torch.dtype]:
    return [dtype for dtype in target.dtypes if dtype != torch.float16]


@pytest.mark.parametrize("case", ["whole", "left", "right", "packed", "rows"])
@pytest.mark.parametrize("family, way", WAYS)
def test_decoders(family: str, way: str, case: str, pack_target: Target) -> None:
    for dtype in dtypes_of(pack_target):
        if family == "doge" and dtype != torch.float32:
            # In 16 bits biases tie or swap order, so rounding decides every selection.
            family = "doge-without-selection"
        model = tiny_model(family, way, device=pack_target.device, dtype=dtype)
        got = results(model, inputs_of(case))
        assert_as_accurate_as_eager(family, got, inputs_of(case))


@pytest.mark.parametrize("case", ["whole", "left", "right"])
def test_encoder(case: str, pack_target: Target) -> None:
    for dtype in dtypes_of(pack_target):
        model = tiny_model("bert", "named", device=pack_target.device, dtype=dtype)
        got = results(model, inputs_of(case))
        assert_as_accurate_as_eager("bert", got, inputs_of(case))


@pytest.mark.parametrize("case", ["whole", "left", "right"])
def test_sinks_and_sliding_windows(case: str, pack_target: Target) -> None:
    """gpt-oss has a sink for each head, and a sliding window in every other layer."""
    for dtype in dtypes_of(pack_target):
        model = tiny_model("gpt_oss", "named", device=pack_target.device, dtype=dtype).eval()
        got = results(model, inputs_of(case))
        assert any("sinks" in name for name in got)
        assert_as_accurate_as_eager("gpt_oss", got, inputs_of(case))


@pytest.mark.parametrize("case", ["whole", "left", "right"])
def test_biases_of_relative_positions(case: str, pack_target: Target) -> None:
    """T5: encoder, decoder and cross attention, and the gradient of the bias table."""
    for dtype in dtypes_of(pack_target):
        model = tiny_model("t5", "named", device=pack_target.device, dtype=dtype).eval()
        got = results(model, inputs_of(case))
        assert sum("relative_attention_bias" in name for name in got) == 2
        assert_as_accurate_as_eager("t5", got, inputs_of(case))


def test_padded_images_are_pooled(pack_target: Target) -> None:
    """The head of Siglip 2 repeats the key mask for each of its own heads."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Siglip2VisionConfig(**sizes, intermediate_size=37, num_patches=16)
    torch.manual_seed(0)
    model = transformers.Siglip2VisionModel(config).eval().to(pack_target.device)
    dtype = dtypes_of(pack_target)[-1]
    given = {
        "pixel_values": torch.randn(4, 16, 3 * config.patch_size**2),
        "pixel_attention_mask": torch.arange(16) < torch.tensor([[16], [10], [16], [1]]),
        "spatial_shapes": torch.tensor([[4, 4], [2, 5], [4, 4], [1, 1]]),
    }
    given = {name: tensor.to(pack_target.device) for name, tensor in given.items()}
    exact, eager, got = (
        pooled(model, name, kind, given)
        for name, kind in (("eager", torch.float64), ("eager", dtype), ("flash_dmattn", dtype))
    )
    assert (got - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-6


def pooled(model: Any, name: str, dtype: torch.dtype, given: dict[str, Tensor]) -> Tensor:
    """Return a vision model's output for images."""
    model.set_attn_implementation(name)
    images = given | {"pixel_values": given["pixel_values"].to(dtype)}
    with torch.no_grad():
        pooler: Tensor = model.to(dtype)(**images).pooler_output
    return pooler.double()


@pytest.mark.parametrize("case", ["whole", "left", "right"])
def test_attention_that_crops_its_mask(case: str) -> None:
    """Pix2Struct's text model slices all four dimensions of a mask with rows."""
    model_class = transformers.Pix2StructTextModel
    if not calls_functions(model_class):
        pytest.skip("Pix2Struct of this transformers computes attention itself")
    sizes = {"hidden_size": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2}
    config = transformers.Pix2StructTextConfig(
        vocab_size=VOCABULARY, initializer_range=0.5, **sizes
    )
    register()
    torch.manual_seed(0)
    model = model_class(config).eval()
    logits = {}
    for name in ("eager", "flash_dmattn"):
        model.set_attn_implementation(name)
        logits[name] = model(tokens(), **inputs_of(case)).logits
    kept = inputs_of(case).get("attention_mask", torch.ones_like(tokens())).bool()
    torch.testing.assert_close(logits["flash_dmattn"][kept], logits["eager"][kept])


# Sizes of models whose attention has no is_causal, or a wrong one.
SAY_NOTHING: dict[str, dict[str, Any]] = {
    "BigBirdPegasus": {"d_model": 32, "attention_type": "original_full"},
    "MarkupLM": {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4},
    "PegasusX": {"d_model": 32},
    "Splinter": {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4},
}


@pytest.mark.parametrize("case", ["whole", "left", "right"])
@pytest.mark.parametrize("family", SAY_NOTHING)
def test_attention_that_does_not_say_what_is_causal(family: str, case: str) -> None:
    """Decoders that are causal by their mask alone, and encoders without is_causal=False."""
    model_class = getattr(transformers, f"{family}Model")
    if not calls_functions(model_class):
        pytest.skip(f"{family} of this transformers computes attention itself")
    sides = ("encoder", "decoder")
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "max_position_embeddings": 128}
    for side in sides:
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 48}
    config = getattr(transformers, f"{family}Config")(**sizes | SAY_NOTHING[family])
    register()
    torch.manual_seed(0)
    model = model_class(config).eval()
    given = inputs_of(case)
    kept = given.get("attention_mask", torch.ones_like(tokens())).bool()
    if config.is_encoder_decoder:
        given |= {f"decoder_{name}": tensor for name, tensor in given.items()}
        given["decoder_input_ids"] = tokens()
    states = {}
    for name in ("eager", "flash_dmattn"):
        model.set_attn_implementation(name)
        states[name] = model(tokens(), **given).last_hidden_state[kept]
    torch.testing.assert_close(states["flash_dmattn"], states["eager"], atol=1e-4, rtol=1e-4)


def test_dropout_of_probabilities_may_be_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """T5 trains with all of its other dropout."""
    monkeypatch.setattr(implementations, "attention_dropout", "refuse")
    model = tiny_model("t5", "named").train()
    with pytest.raises(
        NotImplementedError, match=r"dropout .* got 0\.1: .*attention_dropout='skip'"
    ):
        model(tokens(), labels=tokens())
    register(attention_dropout="skip")
    torch.manual_seed(0)
    one, other = (model(tokens(), labels=tokens()) for _ in range(2))
    assert not torch.equal(one.logits, other.logits)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
    trained = results(model, inputs_of("whole"))
    assert_as_accurate_as_eager("t5", trained, inputs_of("whole"))
    evaluated = results(model.eval(), inputs_of("whole"))
    assert all(torch.equal(trained[name], evaluated[name]) for name in trained)


@pytest.mark.parametrize("family, way", WAYS)
def test_float32_is_tight(family: str, way: str) -> None:
    got = results(tiny_model(family, way), inputs_of("left"))
    want = results(tiny_model(family), inputs_of("left"))
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, want[name], atol=1e-5, rtol=1e-4, msg=name)


def test_selection_of_doge_matters_here() -> None:
    """Another number of kept keys must change the results, so that the tests above detect it."""
    model = tiny_model("doge", "applied")
    for layer in model.model.layers:
        layer.self_attn.keep_window_size += 1
    got = results(model, {})["out"]
    want = results(tiny_model("doge"), {})["out"]
    assert (got - want).abs().max() > 1e-2


def test_attentions_are_refused() -> None:
    model = tiny_model("llama", "named")
    with pytest.raises(NotImplementedError, match="output_attentions"):
        model(tokens(), output_attentions=True)


def test_dropout_in_training_is_refused() -> None:
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=200, attention_dropout=0.1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="flash_dmattn")
    model.eval()(tokens())
    with pytest.raises(NotImplementedError, match=r"dropout must be .* got 0\.1: .*config to 0"):
        model.train()(tokens())
