# SPDX-License-Identifier: BSD-3-Clause
"""Registration with transformers, and use without transformers."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_dmattn.integrations import (
    ATTENTION_NAME,
    apply_flash_dmattn,
    implementations,
    register,
)
from flash_dmattn.integrations.import_utils import is_flash_dmattn_available
from flash_dmattn.integrations.model_masks import model_mask
from flash_dmattn.integrations.packed_documents import Documents
from flash_dmattn.integrations.transformers_attention import REFUSED
from flash_dmattn.masks import IntervalMask

from .tiny_models import tiny_model, tokens, transformers


def test_importing_flash_dmattn_does_not_import_transformers() -> None:
    code = (
        "import sys, flash_dmattn, flash_dmattn.interface; sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_registering_twice_is_harmless() -> None:
    check = transformers.PreTrainedModel._check_and_adjust_attn_implementation
    begin = transformers.GenerationMixin.init_continuous_batching
    register()
    assert transformers.PreTrainedModel._check_and_adjust_attn_implementation is check
    assert transformers.GenerationMixin.init_continuous_batching is begin
    assert ATTENTION_NAME in transformers.AttentionInterface().valid_keys()
    assert is_flash_dmattn_available()


def test_absent_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def find_spec(name: str, *arguments: Any) -> Any:
        return None if name == "transformers" else real(name, *arguments)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(ImportError, match=r"needs transformers >= [\d.]+: pip install"):
        register()


def settings(function: Any, length: int = 12) -> dict[str, Any]:
    newer = "q_length" in inspect.signature(transformers.masking_utils.sdpa_mask).parameters
    queries = (
        {"q_length": length, "q_offset": 0} if newer else {"cache_position": torch.arange(length)}
    )
    return {
        "batch_size": 1, "kv_length": length, "kv_offset": 0, "mask_function": function,
        "attention_mask": None, "allow_is_causal_skip": False, **queries,
    }  # fmt: skip


def test_patterns_of_transformers() -> None:
    masks = transformers.masking_utils
    ids = torch.tensor([[0] * 5 + [1] * 7])
    packed = masks.and_masks(masks.causal_mask_function, masks.packed_sequence_mask_function(ids))
    found = model_mask(**settings(packed))
    assert isinstance(found, Documents)
    assert torch.equal(found.ids, ids.int())

    sliding = settings(masks.sliding_window_causal_mask_function(4))
    found = model_mask(**sliding)
    assert isinstance(found, IntervalMask)
    rows = masks.sdpa_mask(**sliding)
    assert torch.equal(found.to_bool(12), rows)

    def scattered(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & ((query - key) % 3 != 1)

    found = model_mask(**settings(scattered))
    assert torch.equal(found, masks.sdpa_mask(**settings(scattered)))


def test_one_document_needs_no_mask() -> None:
    masks = transformers.masking_utils
    ids = torch.zeros(1, 12, dtype=torch.long)
    packed = masks.and_masks(masks.causal_mask_function, masks.packed_sequence_mask_function(ids))
    assert model_mask(**settings(packed)) is None


def test_blocks_of_rows_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    function = transformers.masking_utils.sliding_window_causal_mask_function(4)
    whole = model_mask(**settings(function))
    monkeypatch.setattr("flash_dmattn.integrations.model_masks._BLOCK_ELEMENTS", 60)
    in_blocks = model_mask(**settings(function))
    assert torch.equal(in_blocks.start, whole.start)
    assert torch.equal(in_blocks.end, whole.end)


_TINY = {"vocab_size": 160, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _begun_as_manager(model: Any, settings: Any) -> None:
    with model.continuous_batching_context_manager(generation_config=settings):
        pass


BEGINNINGS: dict[str, Callable[[Any, Any], Any]] = {
    "generate_batch": lambda model, settings: model.generate_batch(
        inputs=[[3, 4, 5], [6, 7]], generation_config=settings
    ),
    "init_continuous_batching": lambda model, settings: model.init_continuous_batching(settings),
    "continuous_batching_context_manager": _begun_as_manager,
}


@pytest.mark.parametrize("is_biased", [False, True])
@pytest.mark.parametrize("how", BEGINNINGS)
def test_continuous_batching_is_refused_before_it_begins(
    how: str, is_biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions differ in the method that switches a model's attention; some have none."""
    model: Any = tiny_model("llama", "named").eval()
    if not hasattr(model, how):
        pytest.skip(f"this transformers has no {how}")
    text = r"continuous batching .* in place of generate_batch\(\), or model.set_attn"
    if is_biased:
        kind = transformers.models.llama.modeling_llama.LlamaAttention
        apply_flash_dmattn(model, lambda module, value: value[..., 0], attention=kind)
        model.set_attn_implementation("sdpa")
        text = r"continuous batching .* in place of generate_batch\(\)$"
    api = importlib.import_module("transformers.generation.continuous_batching.continuous_api")
    for name in [name for name in vars(api.ContinuousBatchingManager) if name[:7] == "switch_"]:
        monkeypatch.setattr(api.ContinuousBatchingManager, name, lambda *args, **kwargs: None)
    settings = transformers.GenerationConfig(
        max_new_tokens=2, do_sample=False, eos_token_id=2, pad_token_id=0
    )
    with pytest.raises(NotImplementedError, match=text):
        BEGINNINGS[how](model, settings)


def test_the_name_is_kept_where_transformers_knows_another_kernel() -> None:
    """transformers would replace a name with "flash" in it by a flash attention kernel."""
    model = tiny_model("gpt_oss", "named")
    assert model.config._attn_implementation == ATTENTION_NAME


def test_attention_dropout_is_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementations, "attention_dropout", "refuse")
    register()
    assert implementations.attention_dropout == "refuse"
    register(attention_dropout="skip")
    register()
    assert implementations.attention_dropout == "skip"
    with pytest.raises(ValueError, match="attention_dropout must be None, 'refuse' or 'skip', got"):
        register(attention_dropout="ignore")


@pytest.mark.parametrize("name", ["GPTJ", "XLNet"])
def test_models_that_compute_attention_themselves_are_refused(name: str) -> None:
    """GPTJ fails on a missing import; XLNet silently uses its own attention.

    Since transformers 5.24, GPTJ calls attention functions and works with ours.
    """
    if name == "GPTJ":
        model_class = transformers.GPTJForCausalLM
        config = transformers.GPTJConfig(n_embd=32, n_layer=1, n_head=4, rotary_dim=4, **_TINY)
    else:
        model_class = transformers.XLNetLMHeadModel
        config = transformers.XLNetConfig(d_model=32, n_layer=1, n_head=4, d_inner=32, **_TINY)
    if not hasattr(transformers.PreTrainedModel, "_can_set_attn_implementation"):
        pytest.skip("this transformers does not tell which models call attention functions")
    if model_class._can_set_attn_implementation():
        assert name == "GPTJ"
        ours, eager = (
            model_class._from_config(copy.deepcopy(config), attn_implementation=way).eval()
            for way in (ATTENTION_NAME, "eager")
        )
        eager.load_state_dict(ours.state_dict())
        torch.testing.assert_close(ours(tokens()).logits, eager(tokens()).logits)
        assert ours.config._attn_implementation == ATTENTION_NAME
        return
    with pytest.raises(NotImplementedError, match=f"{model_class.__name__} computes attention in"):
        model_class._from_config(config, attn_implementation=ATTENTION_NAME)


# Keyword arguments from models that are used, in addition to the refused ones.
_COMPUTED_WITH = {
    "module", "query", "key", "value", "attention_mask", "scaling", "is_causal", "sliding_window",
    "softcap", "position_bias", "s_aux", "position_ids", "deterministic", "cu_seq_lens_q",
    "cu_seq_lens_k", "max_length_q", "max_length_k", "indices", "block_indices",
}  # fmt: skip


def test_every_argument_that_models_hand_on_is_computed_with_or_refused() -> None:
    """A new argument of transformers must not be ignored silently: it may change the result."""
    found: dict[str, str] = {}
    models = Path(transformers.__file__).parent / "models"
    for source in models.glob("*/modeling_*.py"):
        text = source.read_text()
        for call in re.finditer(r"= attention_interface\(\n(.*?)\n\s+\)\n", text, re.DOTALL):
            for name in re.findall(r"^\s+(\w+)=", call[1], re.MULTILINE):
                found.setdefault(name, source.name)
    assert {"scaling", "dropout", "s_aux"} <= found.keys()
    unknown = {n: f for n, f in found.items() if n not in _COMPUTED_WITH and n not in REFUSED}
    assert not unknown
