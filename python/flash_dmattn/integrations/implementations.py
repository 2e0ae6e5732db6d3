# SPDX-License-Identifier: BSD-3-Clause
"""The attention implementations of this package, and which one a module has."""

from __future__ import annotations

from typing import Any

__all__ = ["ATTENTION_NAME", "KEY_BIAS_ATTENTION_NAME", "NAMES", "other_attention"]

ATTENTION_NAME = "flash_dmattn"
# For models whose attention reads the mask only to hand it on: `apply_flash_dmattn` sets it.
KEY_BIAS_ATTENTION_NAME = "flash_dmattn_key_bias"
NAMES = (ATTENTION_NAME, KEY_BIAS_ATTENTION_NAME)


def other_attention(module: Any) -> str | None:
    """Return the attention implementation of a module of transformers if it is none of ours."""
    name: str | None = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return None if name in NAMES else name
