# SPDX-License-Identifier: BSD-3-Clause
"""What a user chooses once for all models of the process."""

from __future__ import annotations

from flash_dmattn.checks import described

__all__ = ["attention_dropout", "choose_attention_dropout"]

_DROPOUT = ("refuse", "skip")

attention_dropout = "refuse"


def choose_attention_dropout(choice: str) -> None:
    """Choose what becomes of a dropout of probabilities that a model asks for in training."""
    global attention_dropout
    if choice not in _DROPOUT:
        raise ValueError(
            f"attention_dropout must be None, 'refuse' or 'skip', got {described(choice)}"
        )
    attention_dropout = choice
