# SPDX-License-Identifier: BSD-3-Clause
"""Alias: flash-dmattn 1.2.2's name of `transformers_attention`."""

from __future__ import annotations

from .transformers_attention import flash_dynamic_mask_attention_forward

__all__ = ["flash_dynamic_mask_attention_forward"]
