# SPDX-License-Identifier: BSD-3-Clause
"""Alias of `model_attention` by its name in flash-dmattn 1.2.2."""

from __future__ import annotations

from .model_attention import (
    FlashDynamicMaskAttentionKwargs,
    _flash_dynamic_mask_attention_forward,
    fdma_peft_integration_check,
)

__all__ = [
    "FlashDynamicMaskAttentionKwargs",
    "_flash_dynamic_mask_attention_forward",
    "fdma_peft_integration_check",
]
