# SPDX-License-Identifier: BSD-3-Clause
"""Alias: flash-dmattn 1.2.2's name of `model_attention`."""

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
