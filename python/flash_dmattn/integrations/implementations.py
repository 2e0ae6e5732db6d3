# SPDX-License-Identifier: BSD-3-Clause
"""The attention implementations of this package, which one a module has, and what holds for all."""

from __future__ import annotations

from typing import Any

from flash_dmattn.checks import described

__all__ = [
    "ATTENTION_NAME",
    "KEY_BIAS_ATTENTION_NAME",
    "NAMES",
    "attention_dropout",
    "choose_attention_dropout",
    "expects_eager_masks",
    "note_masks_of",
    "other_attention",
]

ATTENTION_NAME = "flash_dmattn"
# For models whose attention reads the mask only to hand it on: `apply_flash_dmattn` sets it.
KEY_BIAS_ATTENTION_NAME = "flash_dmattn_key_bias"
NAMES = (ATTENTION_NAME, KEY_BIAS_ATTENTION_NAME)
# They list neither SDPA nor flash attention in some versions, but only hand masks on.
_MASK_IS_HANDED_ON = frozenset({"doge", "mt5", "t5"})
# The types of the models in use whose code is written for eager attention alone.
_types_for_eager: set[str] = set()
_DROPOUT = ("refuse", "skip")

# What becomes of a dropout of probabilities that a model asks for in training.
attention_dropout = "refuse"


def choose_attention_dropout(choice: str) -> None:
    """Choose that for all models of the process: "refuse" or "skip"."""
    global attention_dropout
    if choice not in _DROPOUT:
        raise ValueError(
            f"attention_dropout must be None, 'refuse' or 'skip', got {described(choice)}"
        )
    attention_dropout = choice


def other_attention(module: Any) -> str | None:
    """Return the attention implementation of a module of transformers if it is none of ours."""
    name: str | None = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return None if name in NAMES else name


def note_masks_of(model_class: Any, config: Any) -> None:
    """Keep in mind whether models of a class of transformers list no attention but eager.

    Their code may add the mask to scores of its own, join another to it, or count tokens by it, and
    may say nothing of what is causal, or the wrong thing.
    """
    lists_others = any(
        getattr(model_class, name, False) for name in ("_supports_sdpa", "_supports_flash_attn")
    )
    model_type = getattr(config, "model_type", "")
    # Of models that users write, only they know.
    is_known = model_type and model_class.__module__.startswith("transformers.")
    if is_known and not lists_others and model_type not in _MASK_IS_HANDED_ON:
        _types_for_eager.add(model_type)


def expects_eager_masks(config: Any) -> bool:
    """Say whether a model computes with the masks of eager attention, which say all."""
    return getattr(config, "model_type", None) in _types_for_eager
