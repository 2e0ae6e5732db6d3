# SPDX-License-Identifier: BSD-3-Clause
"""Dynamic mask attention whose time and memory follow the kept keys.

Importing this package imports neither torch nor a kernel: each name is looked up when it is first
touched.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from .interface import (
        flash_dmattn_func,
        flash_dmattn_func_auto,
        flash_dmattn_varlen_func,
        get_available_backends,
    )
    from .masks import IntervalMask
    from .modules import AttentionCache, DynamicMaskAttention
    from .plan import AttentionPlan, make_plan
    from .reference import attention_reference
    from .selection import dynamic_mask

    CUDA_AVAILABLE: bool
    TRITON_AVAILABLE: bool
    FLEX_AVAILABLE: bool
    triton_dmattn_func: Callable[..., Any] | None
    flex_dmattn_func: Callable[..., Any] | None
    __version__: str

__all__ = [
    "CUDA_AVAILABLE",
    "FLEX_AVAILABLE",
    "TRITON_AVAILABLE",
    "AttentionCache",
    "AttentionPlan",
    "DynamicMaskAttention",
    "IntervalMask",
    "__version__",
    "attention_reference",
    "dynamic_mask",
    "flash_dmattn_func",
    "flash_dmattn_func_auto",
    "flash_dmattn_varlen_func",
    "flex_dmattn_func",
    "get_available_backends",
    "make_plan",
    "triton_dmattn_func",
]

_MODULES = {
    "AttentionCache": "modules",
    "AttentionPlan": "plan",
    "DynamicMaskAttention": "modules",
    "IntervalMask": "masks",
    "attention_reference": "reference",
    "dynamic_mask": "selection",
    "flash_dmattn_func": "interface",
    "flash_dmattn_func_auto": "interface",
    "flash_dmattn_varlen_func": "interface",
    "get_available_backends": "interface",
    "make_plan": "plan",
}
_AVAILABILITY = {"CUDA_AVAILABLE": "cuda", "TRITON_AVAILABLE": "triton", "FLEX_AVAILABLE": "flex"}
# None where the backend is absent, as callers of 1.2.2 test for.
_BOUND_FUNCTIONS = {"triton_dmattn_func": "triton", "flex_dmattn_func": "flex"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = importlib.metadata.version("flash-dmattn")
    elif name in _BOUND_FUNCTIONS:
        _require_torch(name)
        backend, value = _BOUND_FUNCTIONS[name], None
        if importlib.import_module(f"{__name__}.backends").is_available(backend):
            interface = importlib.import_module(f"{__name__}.interface")
            value = interface.flash_dmattn_func_auto(backend)
    elif name in _AVAILABILITY:
        _require_torch(name)
        value = importlib.import_module(f"{__name__}.backends").is_available(_AVAILABILITY[name])
    elif name in _MODULES:
        _require_torch(name)
        value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _require_torch(name: str) -> None:
    try:
        importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"flash_dmattn.{name} needs PyTorch, which is not installed: pip install "
            "'flash-dmattn[torch]'"
        ) from error
