# SPDX-License-Identifier: BSD-3-Clause
"""Being known to transformers, and doing without it."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch

from flash_dmattn.integrations import ATTENTION_NAME, register
from flash_dmattn.integrations.import_utils import is_flash_dmattn_available
from flash_dmattn.integrations.model_masks import model_mask
from flash_dmattn.integrations.packed import Documents
from flash_dmattn.masks import IntervalMask

from .tiny_models import transformers


def test_importing_flash_dmattn_does_not_import_transformers() -> None:
    code = (
        "import sys, flash_dmattn, flash_dmattn.interface; sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_registering_twice_is_harmless() -> None:
    manager = transformers.ContinuousBatchingManager
    check = transformers.PreTrainedModel._check_and_adjust_attn_implementation
    switch = manager.switch_to_cb_friendly_attn
    register()
    assert transformers.PreTrainedModel._check_and_adjust_attn_implementation is check
    assert manager.switch_to_cb_friendly_attn is switch
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
