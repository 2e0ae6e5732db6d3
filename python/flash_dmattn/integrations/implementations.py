# SPDX-License-Identifier: BSD-3-Clause
"""The attention implementations of this package, a module's implementation, and global settings."""

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
# For models whose attention only passes the mask on. `apply_flash_dmattn` sets it.
KEY_BIAS_ATTENTION_NAME = "flash_dmattn_key_bias"
NAMES = (ATTENTION_NAME, KEY_BIAS_ATTENTION_NAME)
# Some versions of these list neither SDPA nor flash attention, but only pass masks on.
_MASK_IS_HANDED_ON = frozenset({"doge", "mt5", "t5"})
# Types of the models in use whose code supports eager attention only.
_types_for_eager: set[str] = set()
_DROPOUT = ("refuse", "skip")

# What happens if a model requests dropout of probabilities in training.
attention_dropout = "refuse"


def choose_attention_dropout(choice: str) -> None:
    """Set attention_dropout for all models of the process: "refuse" or "skip"."""
    global attention_dropout
    if choice not in _DROPOUT:
        raise ValueError(
            f"attention_dropout must be None, 'refuse' or 'skip', got {described(choice)}"
        )
    attention_dropout = choice


def other_attention(module: Any) -> str | None:
    """Return a transformers module's attention implementation, None if it is of this package."""
    name: str | None = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return None if name in NAMES else name


def note_masks_of(model_class: Any, config: Any) -> None:
    """Record whether a transformers model class supports no attention but eager.

    The code of such models may add the mask to its own scores, combine it with another, or count
    tokens by it. Its ``is_causal`` may be absent or wrong.
    """
    lists_others = any(
        getattr(model_class, name, False) for name in ("_supports_sdpa", "_supports_flash_attn")
    )
    model_type = getattr(config, "model_type", "")
    # User-defined models are not judged.
    is_known = model_type and model_class.__module__.startswith("transformers.")
    if is_known and not lists_others and model_type not in _MASK_IS_HANDED_ON:
        _types_for_eager.add(model_type)


def expects_eager_masks(config: Any) -> bool:
    """Say whether a model needs the masks of eager attention, which are complete."""
    return getattr(config, "model_type", None) in _types_for_eager
