# SPDX-License-Identifier: BSD-3-Clause
"""The public names of the package, imported at their first use."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

_MODULES = {
    "AttentionCache": "modules",
    "AttentionPlan": "plan",
    "DynamicMaskAttention": "modules",
    "ForgettingAttention": "modules",
    "ForgettingCache": "modules",
    "IntervalMask": "masks",
    "KeptKeys": "state",
    "attention_reference": "reference_arguments",
    "dynamic_mask": "selection",
    "explain": "explanation",
    "flash_dmattn_func": "interface",
    "flash_dmattn_func_auto": "interface",
    "flash_dmattn_varlen_func": "interface",
    "forgetting_bias": "forgetting",
    "get_available_backends": "interface",
    "make_plan": "plan",
    "pair_bias_attention": "pair_bias",
    "pruning_threshold": "forgetting",
}
_AVAILABILITY = {"CUDA_AVAILABLE": "cuda", "TRITON_AVAILABLE": "triton", "FLEX_AVAILABLE": "flex"}
# Each is None if its backend is absent, because callers of 1.2.2 test for None.
_BOUND_FUNCTIONS = {"triton_dmattn_func": "triton", "flex_dmattn_func": "flex"}


def look_up(name: str) -> Any:
    """Return the object of a public name of the package.

    Raises:
        AttributeError: the package has no such name.
        ImportError: the name needs PyTorch, which is not installed.
    """
    if name == "__version__":
        return importlib.metadata.version("flash-dmattn")
    if name not in {*_MODULES, *_AVAILABILITY, *_BOUND_FUNCTIONS}:
        raise AttributeError(f"module {__package__!r} has no attribute {name!r}")
    _require_torch(name)
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__package__}.{_MODULES[name]}"), name)
    from .backends import is_available

    if name in _AVAILABILITY:
        return is_available(_AVAILABILITY[name])
    from .interface import flash_dmattn_func_auto

    backend = _BOUND_FUNCTIONS[name]
    return flash_dmattn_func_auto(backend) if is_available(backend) else None


def _require_torch(name: str) -> None:
    try:
        importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"flash_dmattn.{name} needs PyTorch, which is not installed: pip install torch"
        ) from error
