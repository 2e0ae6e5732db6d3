# SPDX-License-Identifier: BSD-3-Clause
"""Dynamic mask attention whose time and memory grow with the number of kept keys.

Importing this package imports neither torch nor a kernel. Each public name is imported at its
first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .lazy_names import look_up as _look_up

if TYPE_CHECKING:
    from collections.abc import Callable

    from .explanation import explain
    from .forgetting import forgetting_bias, pruning_threshold
    from .interface import (
        flash_dmattn_func,
        flash_dmattn_func_auto,
        flash_dmattn_varlen_func,
        get_available_backends,
    )
    from .masks import IntervalMask
    from .modules import (
        AttentionCache,
        DynamicMaskAttention,
        ForgettingAttention,
        ForgettingCache,
    )
    from .pair_bias import pair_bias_attention
    from .plan import AttentionPlan, make_plan
    from .reference_arguments import attention_reference
    from .selection import dynamic_mask
    from .state import KeptKeys

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
    "ForgettingAttention",
    "ForgettingCache",
    "IntervalMask",
    "KeptKeys",
    "__version__",
    "attention_reference",
    "dynamic_mask",
    "explain",
    "flash_dmattn_func",
    "flash_dmattn_func_auto",
    "flash_dmattn_varlen_func",
    "flex_dmattn_func",
    "forgetting_bias",
    "get_available_backends",
    "make_plan",
    "pair_bias_attention",
    "pruning_threshold",
    "triton_dmattn_func",
]


def __getattr__(name: str) -> Any:
    value = globals()[name] = _look_up(name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
