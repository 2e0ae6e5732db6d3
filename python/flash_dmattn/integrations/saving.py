# SPDX-License-Identifier: BSD-3-Clause
"""Saying what files of a model do not hold."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from .wrap_once import wrap_once

__all__ = ["warn_when_saved"]

_ATTRIBUTE = "flash_dmattn_unsaved"
# What PEFT puts before the names of a model that it has wrapped.
_PEFT_PREFIX = "base_model.model."


def warn_when_saved(module: torch.nn.Module, lost: str) -> None:
    """Warn when a model is saved, as its files do not hold all of what was given to its modules.

    Args:
        module: the first of those.
        lost: what files do not hold; nothing if empty.
    """
    from transformers import PreTrainedModel

    wrap_once(PreTrainedModel, "save_pretrained", _save_and_warn)
    if not hasattr(module, _ATTRIBUTE):
        module.register_state_dict_pre_hook(_warn_if_adapted)  # type: ignore[no-untyped-call]
    setattr(module, _ATTRIBUTE, lost)


def _save_and_warn(
    save: Callable[..., Any], model: torch.nn.Module, *args: Any, **kwargs: Any
) -> Any:
    if lost := next(filter(None, (getattr(m, _ATTRIBUTE, "") for m in model.modules())), ""):
        warnings.warn(
            f"save_pretrained() does not store the {lost} of apply_flash_dmattn: call it again, "
            "with the same arguments, on the model that is loaded, which computes without until "
            "then",
            stacklevel=3,
        )
    return save(model, *args, **kwargs)


def _warn_if_adapted(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
    """Warn where PEFT asks for what it saves; its own method calls none of the model's."""
    if (lost := getattr(module, _ATTRIBUTE)) and prefix.startswith(_PEFT_PREFIX):
        warnings.warn(
            f"PEFT does not store the {lost} of apply_flash_dmattn: call it again, with the same "
            "arguments, on the base model that is loaded. It stores (and trains) parameters of "
            "key_bias only in modules that modules_to_save names",
            stacklevel=2,
        )
