# SPDX-License-Identifier: BSD-3-Clause
"""Registering with transformers."""

from __future__ import annotations

import functools
from typing import Any

from .import_utils import require_transformers

__all__ = ["ATTENTION_NAME", "KEY_BIAS_ATTENTION_NAME", "register"]

ATTENTION_NAME = "flash_dmattn"
# For models whose attention reads the mask only to hand it on: `apply_flash_dmattn` sets it.
KEY_BIAS_ATTENTION_NAME = "flash_dmattn_key_bias"


def register() -> None:
    """Make ``attn_implementation="flash_dmattn"`` known to transformers. Repeating it is harmless.

    Raises:
        ImportError: transformers is absent, or older than the ``transformers`` extra asks for.
    """
    require_transformers()
    from transformers import AttentionInterface, AttentionMaskInterface

    from .flash_dynamic_mask_attention import flash_dynamic_mask_attention_forward
    from .model_masks import compact_model_mask, model_mask

    for name, mask in ((ATTENTION_NAME, model_mask), (KEY_BIAS_ATTENTION_NAME, compact_model_mask)):
        AttentionInterface.register(name, flash_dynamic_mask_attention_forward)
        AttentionMaskInterface.register(name, mask)
    _spare_preloading()


def _spare_preloading() -> None:
    """Keep transformers from looking for the kernels of our names.

    From version 5 it takes each name with "flash" in it, registered or not, for a kernel of flash
    attention that it has to load before the model can be made.
    """
    from transformers import modeling_utils

    load = getattr(modeling_utils, "lazy_import_flash_attention", None)
    if load is None or hasattr(load, "spares_flash_dmattn"):
        return

    @functools.wraps(load)
    def load_others(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation in (ATTENTION_NAME, KEY_BIAS_ATTENTION_NAME):
            return None
        return load(implementation, *args, **kwargs)

    load_others.spares_flash_dmattn = True  # type: ignore[attr-defined]
    modeling_utils.lazy_import_flash_attention = load_others
