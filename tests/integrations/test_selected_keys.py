# SPDX-License-Identifier: BSD-3-Clause
"""Models with an indexer that selects keys for each query, or with values narrower than keys, match
eager attention.
"""

from __future__ import annotations

import copy
import functools
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

from flash_dmattn import flash_dmattn_func
from flash_dmattn.integrations import register, transformers_attention
from flash_dmattn.key_lists import ops as key_list_ops
from flash_dmattn.masks import IntervalMask

from .tiny_models import LENGTH, VOCABULARY, inputs_of, padding, tokens

_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_experts_per_tok": 1, "moe_intermediate_size": 16, "q_lora_rank": 16,
    "index_topk": 8, "index_head_dim": 16, "index_n_heads": 2,
}  # fmt: skip
# Multi-head latent attention: values are narrower than keys.
_LATENT = {
    **_SIZES, "intermediate_size": 48, "num_key_value_heads": 4, "n_routed_experts": 2,
    "n_group": 1, "topk_group": 1, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _indexed(earlier: str) -> dict[str, list[str]]:
    """Return two layers of a kind whose name differs between versions of transformers."""
    known = "indexed_attention" in ALLOWED_LAYER_TYPES
    return {"layer_types": ["indexed_attention" if known else earlier] * 2}


# For each family: its config class, its model class, and sizes.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32ForCausalLM", _LATENT),
    "glm_moe_dsa": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", _LATENT),
    "hy_v4": ("HYV4Config", "HYV4ForCausalLM", _LATENT),
    "axk2": ("AXK2Config", "AXK2ForCausalLM", _LATENT),
    "dots3_note": ("Dots3NoteTextConfig", "Dots3NoteForCausalLM", _LATENT),
    "mistral_large4": (
        "MistralLarge4TextConfig", "MistralLarge4TextModel", {**_LATENT, "rope_parameters": _ROPE},
    ),
    "hy_v4_vl": (
        "HYV4VLTextConfig", "HYV4VLTextModel",
        {**_LATENT, "rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}},
    ),
    "minimax_m3_vl": (
        "MiniMaxM3VLTextConfig", "MiniMaxM3VLForCausalLM",
        {**_SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 16,
         "rotary_dim": 8, "num_local_experts": 2, "dense_intermediate_size": 32,
         "shared_intermediate_size": 16, "index_block_size": 4, "index_topk_blocks": 3,
         "layer_types": ["minimax_m3_sparse"] * 2},
    ),
    # These turn their selection into masks.
    "glm5_next": (
        "Glm5NextTextConfig", "Glm5NextTextModel",
        {**_LATENT, **_indexed("deepseek_sparse_attention"), "index_kpool": 4,
         "qk_rope_head_dim": 0},
    ),
    "qwen4_exp": (
        "Qwen4ExpTextConfig", "Qwen4ExpTextModel",
        {**_SIZES, **_indexed("qwen_sparse_attention"), "num_key_value_heads": 2, "head_dim": 16,
         "num_experts": 2,
         "indexer_budget": 8, "indexer_compress_ratio": 4, "indexer_n_heads": 2,
         "indexer_kv_heads": 1, "indexer_head_dim": 16},
    ),
    # These have values narrower than keys, and no selection.
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", _LATENT),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", _LATENT),
    "mistral4": ("Mistral4Config", "Mistral4ForCausalLM", _LATENT),
    "kimi_linear": (
        "KimiLinearConfig", "KimiLinearForCausalLM",
        {**_LATENT, "layer_types": ["full_attention"] * 2},
    ),
    "axk1": ("AXK1Config", "AXK1ForCausalLM", _LATENT),
    "longcat_flash": (
        "LongcatFlashConfig", "LongcatFlashForCausalLM",
        {**_LATENT, "head_dim": 8, "num_layers": 2, "num_experts_per_tok": 2, "moe_topk": 2,
         "ffn_hidden_size": 48, "zero_expert_num": 1, "expert_ffn_hidden_size": 16},
    ),
    "youtu": ("YoutuConfig", "YoutuForCausalLM", _LATENT),
    "bailing_hybrid": (
        "BailingHybridConfig", "BailingHybridForCausalLM",
        {**_LATENT, "layer_types": ["full_attention"] * 2, "head_dim": 8},
    ),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", _LATENT),
    "minicpm3": ("MiniCPM3Config", "MiniCPM3ForCausalLM", _LATENT),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig", "MiMoV2FlashForCausalLM",
        {**_LATENT, "head_dim": 24, "sliding_window": 8, "num_key_value_heads": 2,
         "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "deepseek_v4": (
        "DeepseekV4Config", "DeepseekV4ForCausalLM",
        {**_SIZES, "head_dim": 16, "o_groups": 2, "o_lora_rank": 8, "sliding_window": 8,
         "n_routed_experts": 2},
    ),
}  # fmt: skip
GENERATE = [family for family, (_, name, _) in MODELS.items() if name.endswith("CausalLM")]
NOT_LISTING = (
    "glm5_next", "qwen4_exp", "deepseek_v4", "deepseek_v2", "deepseek_v3", "mistral4", "axk1",
    "kimi_linear", "longcat_flash", "youtu", "bailing_hybrid", "glm4_moe_lite", "minicpm3",
    "mimo_v2_flash",
)  # fmt: skip
LISTING = [family for family in MODELS if family not in NOT_LISTING]


@functools.cache
def _weights(family: str) -> tuple[Any, Any, dict[str, Tensor]]:
    config_name, model_name, sizes = MODELS[family]
    package = f"transformers.models.{family}"
    try:
        configs = importlib.import_module(f"{package}.configuration_{family}")
        models = importlib.import_module(f"{package}.modeling_{family}")
    except ImportError:
        pytest.skip(f"this transformers has no {family}")
    config, model_class = getattr(configs, config_name)(**sizes), getattr(models, model_name)
    torch.manual_seed(0)
    model = model_class._from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model_class, config, model.state_dict()


def tiny(family: str, attention: str) -> Any:
    register()
    model_class, config, weights = _weights(family)
    model = model_class._from_config(copy.deepcopy(config), attn_implementation=attention)
    model.load_state_dict(weights)
    return model.eval()


def results(family: str, attention: str, case: str) -> dict[str, Tensor]:
    """Return the logits or states of real tokens, a loss, and its gradients by all weights."""
    model, given = tiny(family, attention), inputs_of(case)
    if "position_ids" in given:
        given["position_ids"] = given["position_ids"].expand(2, -1)
    counted = given.get("attention_mask", torch.ones(2, LENGTH)).bool()
    made = model(tokens(), use_cache=False, **given)
    out = (made.logits if hasattr(made, "logits") else made.last_hidden_state)[counted]
    loss = torch.nn.functional.cross_entropy(out, tokens()[counted] % out.shape[-1])
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "loss": loss.detach(), **gradients}


# MiniMax's indexer also scores padding, and it takes the positions of packed documents for places.
# Some queries then have no keys: eager attention gives them the mean of all values.
_CASES = [
    (family, case)
    for family in MODELS
    for case in ("whole", "left", "right", "packed")
    if family != "minimax_m3_vl" or case in ("whole", "right")
]


@pytest.mark.parametrize("family, case", _CASES)
def test_models_compute_what_they_do_with_eager_attention(
    family: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = results(family, "eager", case)
    lists = []
    check = key_list_ops.check_call  # of each forward pass

    def noted(inputs: Any, backend: str) -> None:
        lists.append(inputs.indices.shape)
        check(inputs, backend)

    monkeypatch.setattr(key_list_ops, "check_call", noted)
    got = results(family, "flash_dmattn", case)
    assert len(lists) == (2 if family in LISTING else 0)
    assert all(shape[-1] < LENGTH for shape in lists)
    assert got.keys() == want.keys()
    assert got["out"].isfinite().all()
    if want["out"].isnan().any():
        pytest.skip("eager attention gives NaN: this version adds two masks of finfo.min")
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, want[name], atol=2e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("family", LISTING)
def test_what_is_selected_matters_here(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignoring the selected keys must change the results, so that the test above detects it."""
    want = results(family, "eager", "whole")["out"]
    monkeypatch.setattr(
        transformers_attention,
        "selected_keys",
        lambda _, kwargs: (
            [kwargs.pop(name, None) for name in ("indices", "block_indices")] and None
        ),
    )
    got = results(family, "flash_dmattn", "whole")["out"]
    assert (got - want).abs().max() > 1e-2


@pytest.mark.parametrize(
    "family, padded",
    [(family, padded) for family in GENERATE for padded in (False, True)
     if (family, "left" if padded else "whole") in _CASES],
)  # fmt: skip
def test_generated_tokens_are_those_of_eager_attention(family: str, padded: bool) -> None:
    mask = padding("left") if padded else torch.ones_like(padding("left"))
    options = {"max_new_tokens": 10, "do_sample": False, "attention_mask": mask}
    got, want = (tiny(family, a).generate(tokens(), **options) for a in ("flash_dmattn", "eager"))
    assert torch.equal(got, want)


H, HK, Q, K, D = 4, 2, 9, 12, 8


class Module(torch.nn.Module):
    """A stand-in for the module that calls attention."""

    is_causal = True


def _problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key = torch.randn(2, H, Q, D), torch.randn(2, HK, K, D)
    indices = torch.rand(2, Q, K).argsort(-1)[..., :5]
    indices[:, :, 3] = torch.randint(-3, 0, (2, Q))
    indices[:, :, 4] = torch.randint(K, K + 3, (2, Q))
    return query, key, torch.randn(2, HK, K, 6), indices


def _by_mask(problem: tuple[Tensor, ...], kept: Tensor, bias: Tensor | None = None) -> Tensor:
    query, key, value, indices = problem
    listed = torch.zeros(2, Q, K, dtype=torch.bool).scatter(-1, indices[..., :3], True)
    value = torch.nn.functional.pad(value, (0, 2))
    states = (t.transpose(1, 2) for t in (query, key, value))
    out = flash_dmattn_func(*states, kept & listed[:, None], bias, backend="reference")
    assert isinstance(out, Tensor)
    return out[..., :6]


_CAUSAL = torch.ones(Q, K, dtype=torch.bool).tril(K - Q)
_ROWS = torch.rand(2, 1, Q, K) < 0.7
_OF_HEADS = torch.rand(2, H, Q, K) < 0.7
_PADDING = torch.arange(K)[None] >= torch.tensor([[4], [0]])
_ADDED = torch.randn(2, 1, Q, K)
_NEAR = IntervalMask.sliding_window(3, 0, Q, K)
_BOUNDS_Q, _BOUNDS_K = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (Q, K))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "mask, others, kept, bias",
    [
        (None, {}, _CAUSAL, None),
        (None, {"is_causal": False}, _CAUSAL.new_ones(Q, K), None),
        (_PADDING, {}, _CAUSAL & _PADDING[:, None, None], None),
        (_ROWS, {}, _ROWS, None),
        (_OF_HEADS, {}, _OF_HEADS, None),
        (_ADDED.masked_fill(~_ROWS, torch.finfo(torch.float32).min), {}, _ROWS, _ADDED),
        (_OF_HEADS, {"attention_bias": _ADDED}, _OF_HEADS, _ADDED),
        (_NEAR, {}, _NEAR.to_bool(Q), None),
        (None, {"sliding_window": 4}, _NEAR.to_bool(Q), None),
        (None, {"cu_seq_lens_q": _BOUNDS_Q, "cu_seq_lens_k": _BOUNDS_K, "max_length_q": Q,
                "max_length_k": K}, _CAUSAL, None),
    ],
    ids=["causal", "all", "padding", "rows", "heads", "added", "heads and bias", "intervals",
         "sliding", "cu_seq_lens"],
)  # fmt: skip
def test_lists_and_masks(
    mask: Any, others: dict[str, Any], kept: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> None:
    problem = _problem()
    query, key, value, indices = problem
    out, _ = transformers_attention.flash_dynamic_mask_attention_forward(
        Module(), query, key, value, mask, indices=indices.to(dtype), **others
    )
    torch.testing.assert_close(out, _by_mask(problem, kept, bias))


@pytest.mark.parametrize(
    "wrong, error, text",
    [
        ({"indices": torch.zeros(2, Q, 3)}, TypeError, "indices must have dtype"),
        ({"indices": torch.zeros(2, 3).int()}, ValueError, r"indices must have shape \(B, Q, k\)"),
        ({"indices": torch.zeros(2, Q + 1, 3).int()}, ValueError, r"got indices of shape"),
        ({"indices": torch.zeros(2, HK + 1, Q, 3).int()}, ValueError, f"or Hk={HK} heads, got ind"),
        ({"indices": [1]}, TypeError, "indices must be a torch.Tensor"),
        ({"block_indices": torch.zeros(2, HK, Q, 3).int()}, ValueError, "indexer.block_size"),
        ({"block_indices": torch.zeros(2, Q, 3).int()}, ValueError, "block_indices must have"),
        ({"indices": torch.zeros(2, Q, 3).int(), "window_size": 3}, ValueError, "window_size"),
    ],
)  # fmt: skip
def test_wrong_lists(wrong: dict[str, Any], error: type[Exception], text: str) -> None:
    query, key, value, _ = _problem()
    with pytest.raises(error, match=text):
        transformers_attention.flash_dynamic_mask_attention_forward(
            Module(), query, key, value, None, **wrong
        )


def test_lists_without_keys() -> None:
    query, key, value, indices = _problem()
    out, _ = transformers_attention.flash_dynamic_mask_attention_forward(
        Module(), query, key[:, :, :0], value[:, :, :0], torch.ones(2, 0), indices=indices
    )
    assert not out.any()


def test_lists_and_intervals_that_do_not_fit() -> None:
    query, key, value, indices = _problem()
    with pytest.raises(ValueError, match=r"attention_mask must have shape .* got \(3, 1, 1, "):
        transformers_attention.flash_dynamic_mask_attention_forward(
            Module(), query, key, value, IntervalMask(*torch.zeros(2, 3, 1, Q).int()),
            indices=indices,
        )  # fmt: skip
