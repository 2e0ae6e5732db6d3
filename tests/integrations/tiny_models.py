# SPDX-License-Identifier: BSD-3-Clause
"""Small models of transformers with random weights, and their results."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from support import assert_accurate

transformers = pytest.importorskip("transformers")

from flash_dmattn.integrations import apply_flash_dmattn  # noqa: E402

LENGTH = 40
WINDOW = 8
VOCABULARY = 160
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# The ways to make a family use flash_dmattn.
WAYS = [("doge", "named"), ("doge", "applied"), ("llama", "named"), ("mistral", "named")]


def _class_and_config(family: str, layers: int) -> tuple[Any, Any]:
    sizes = {**_SIZES, "num_hidden_layers": layers}
    if family == "bert":
        if int(transformers.__version__.split(".")[0]) < 5:
            pytest.skip("BERT has no attention interface before transformers 5")
        no_dropout = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
        return transformers.BertForMaskedLM, transformers.BertConfig(**sizes, **no_dropout)
    if family == "t5":
        sizes_of_t5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "dropout_rate": 0.1}
        config = transformers.T5Config(
            vocab_size=VOCABULARY, num_layers=layers, decoder_start_token_id=0, **sizes_of_t5
        )
        if not calls_functions(transformers.T5ForConditionalGeneration):
            pytest.skip("T5 of this transformers computes attention itself")
        return transformers.T5ForConditionalGeneration, config
    sizes["num_key_value_heads"] = 2
    if family == "gpt_oss":
        if not hasattr(transformers, "GptOssConfig"):
            pytest.skip("this transformers has no gpt-oss")
        kinds = ["sliding_attention", "full_attention"]
        config = transformers.GptOssConfig(
            # One expert: in 16 bits rounding would decide among several.
            **sizes, head_dim=8, sliding_window=WINDOW, num_local_experts=1, num_experts_per_tok=1,
            layer_types=[kinds[n % 2] for n in range(layers)],
        )  # fmt: skip
        return transformers.GptOssForCausalLM, config
    if family.startswith("doge"):
        window = WINDOW if family == "doge" else LENGTH
        config = transformers.DogeConfig(**sizes, keep_window_size=window)
        return transformers.DogeForCausalLM, config
    if family == "mistral":
        config = transformers.MistralConfig(**sizes, sliding_window=WINDOW)
        return transformers.MistralForCausalLM, config
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**sizes)


def calls_functions(model_class: Any) -> bool:
    tells = getattr(model_class, "_can_set_attn_implementation", None)
    return tells is not None and tells()


@functools.cache
def _weights(family: str, layers: int) -> tuple[Any, Any, dict[str, Tensor]]:
    model_class, config = _class_and_config(family, layers)
    # Made once: drawing them must not move the generator of the first test that needs them.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class._from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model_class, config, model.state_dict()


def tiny_model(
    family: str,
    way: str = "eager",
    *,
    layers: int = 2,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Return a model of a family, always with the same weights.

    Its attention is "eager", "named" by attn_implementation, or "applied" by apply_flash_dmattn.
    """
    model_class, config, weights = _weights(family, layers)
    attention = "flash_dmattn" if way == "named" else "eager"
    model = model_class._from_config(copy.deepcopy(config), attn_implementation=attention)
    model.load_state_dict(weights)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # only this one computes in float64
    model.to(device, dtype)
    return apply_flash_dmattn(model) if way == "applied" else model


def tokens(batch: int = 2, length: int = LENGTH, seed: int = 0) -> Tensor:
    """Return token numbers without repetition in a row.

    Equal tokens have equal biases in the first layer, and the topk of eager attention may keep any
    of them.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(VOCABULARY - 3, generator=generator)[:length] for _ in range(batch)]
    return torch.stack(rows) + 3


def padding(side: str, length: int = LENGTH) -> Tensor:
    """Return the mask of two rows; the first has 11 places without a token."""
    place = torch.arange(length)
    first = place >= 11 if side == "left" else place < length - 11
    return torch.stack([first, torch.ones(length, dtype=torch.bool)]).long()


def packed_positions(*lengths: int) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def inputs_of(case: str) -> dict[str, Tensor]:
    """Return a model's inputs apart from tokens."""
    if case in ("left", "right"):
        return {"attention_mask": padding(case)}
    if case == "packed":
        return {"position_ids": packed_positions(3, 21, 16)}
    if case == "rows":  # a 4-D mask, which is used unchanged
        kept = torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(5)) < 0.5
        kept = (kept | torch.eye(LENGTH, dtype=torch.bool)).tril()
        return {"attention_mask": kept}
    return {}


def results(model: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the logits of the real tokens, and the gradients of their loss by all weights."""
    device, given = model.device, dict(given)
    mask = given.get("attention_mask")
    are_tokens = given.pop("tokens_of", mask)
    counted = torch.ones(2, LENGTH, dtype=torch.bool)
    if are_tokens is not None and are_tokens.dim() == 2:
        counted = are_tokens.bool()
    # Predictions of places without a token do not count.
    predicted = counted & torch.nn.functional.pad(counted, (1, 0), value=True)[:, :-1]
    labels = tokens().masked_fill(~predicted, -100)
    if mask is not None and mask.dim() == 4 and model.config._attn_implementation == "eager":
        added = torch.zeros(mask.shape, dtype=model.dtype)
        given = {"attention_mask": added.masked_fill(~mask, torch.finfo(model.dtype).min)}
    model.zero_grad()
    options = {} if model.config.model_type in ("bert", "t5") else {"use_cache": False}
    out = model(
        tokens().to(device),
        labels=labels.to(device),
        **{name: tensor.to(device) for name, tensor in given.items()},
        **options,
    )
    out.loss.backward()
    named = {
        name: parameter.grad.cpu()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {"out": out.logits[counted.to(device)].detach().cpu(), **named}


def _without_empty_rows(model: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Let places without a token see themselves, which does not change the other places.

    Eager attention computes its softmax in float32, where float64's lowest number is -inf, and
    gives NaN for empty rows.
    """
    mask = given.get("attention_mask")
    if mask is None or mask.dim() == 4:
        return given
    kept = mask[:, None, None].bool() & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    if model.config.model_type in ("gpt_oss", "t5"):
        return given  # no empty rows: a sink, or an encoder and a decoder
    if model.config.model_type == "mistral":
        kept = kept.triu(1 - WINDOW)
    return {"attention_mask": kept | torch.eye(LENGTH, dtype=torch.bool), "tokens_of": mask}


def assert_as_accurate_as_eager(
    family: str, got: dict[str, Tensor], given: dict[str, Tensor], layers: int = 2
) -> None:
    """Assert the 2x rule against eager attention in float64."""
    dtype = got["out"].dtype
    exact = tiny_model(family, layers=layers, dtype=torch.float64)
    truth = results(exact, given if family == "bert" else _without_empty_rows(exact, given))
    eager = results(tiny_model(family, layers=layers, dtype=dtype), given)
    assert_accurate(got, truth, eager)
