# SPDX-License-Identifier: BSD-3-Clause
"""Warnings, on saving and on loading, about parts of a model that its files do not hold."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .wrap_once import wrap_once

__all__ = ["forget_note", "warn_of_note", "warn_when_saved"]

_ATTRIBUTE = "flash_dmattn_unsaved"
# Attribute of a config, and of its file: what the model needs that no file holds.
_NOTE = "needs_apply_flash_dmattn"
# The config of the last warning. The parts of a model are made with the same config.
_last_warned: Callable[[], Any] | None = None
# PEFT's prefix of the names of a wrapped model.
_PEFT_PREFIX = "base_model.model."


def warn_when_saved(module: torch.nn.Module, lost: str) -> None:
    """Warn when a model is saved if its files lack settings of its modules.

    Args:
        module: the first of these modules.
        lost: what the files lack; no warning if empty.
    """
    from transformers import PreTrainedModel

    wrap_once(PreTrainedModel, "save_pretrained", _save_and_warn)
    if not hasattr(module, _ATTRIBUTE):
        module.register_state_dict_pre_hook(_warn_if_adapted)  # type: ignore[no-untyped-call]
    setattr(module, _ATTRIBUTE, lost)


def _save_and_warn(
    save: Callable[..., Any], model: torch.nn.Module, *args: Any, **kwargs: Any
) -> Any:
    lost = next(filter(None, (getattr(m, _ATTRIBUTE, "") for m in model.modules())), "")
    if lost:
        warnings.warn(
            f"save_pretrained() does not store the {lost} of apply_flash_dmattn: call it again, "
            "with the same arguments, on the model that is loaded, which computes without until "
            "then",
            stacklevel=3,
        )
        setattr(model.config, _NOTE, lost)
    try:
        return save(model, *args, **kwargs)
    finally:
        if lost:
            forget_note(model.config)


def forget_note(config: Any) -> None:
    """Remove the note from a config that was read from a file."""
    if hasattr(config, _NOTE):
        delattr(config, _NOTE)


def warn_of_note(config: Any) -> None:
    """Warn when a model is made from files that lack a part of it."""
    global _last_warned
    lost = getattr(config, _NOTE, None)
    if lost is None or (_last_warned is not None and _last_warned() is config):
        return
    _last_warned = weakref.ref(config)
    warnings.warn(
        f"this model was saved without the {lost} that it computed with: call apply_flash_dmattn "
        "with the same arguments, until when it computes without",
        stacklevel=2,
    )


def _warn_if_adapted(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
    """Warn when PEFT requests the state to save; it calls no other method of the model."""
    if (lost := getattr(module, _ATTRIBUTE)) and prefix.startswith(_PEFT_PREFIX):
        warnings.warn(
            f"PEFT does not store the {lost} of apply_flash_dmattn: call it again, with the same "
            "arguments, on the base model that is loaded. It stores (and trains) parameters of "
            "key_bias only in modules that modules_to_save names",
            stacklevel=2,
        )
