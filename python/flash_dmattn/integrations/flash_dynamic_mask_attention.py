# SPDX-License-Identifier: BSD-3-Clause
"""Alias of `transformers_attention` by its name in flash-dmattn 1.2.2."""

from __future__ import annotations

from .transformers_attention import flash_dynamic_mask_attention_forward

__all__ = ["flash_dynamic_mask_attention_forward"]
