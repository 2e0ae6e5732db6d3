# SPDX-License-Identifier: BSD-3-Clause
"""What kernels cannot differentiate or map, in the words of the errors."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

__all__ = [
    "current_backward",
    "refuse_double_backward",
    "refuse_forward_mode",
    "refuse_recomputation",
    "refuse_vmap",
]

_USE_REFERENCE = (
    "pass backend='reference', the formula in plain PyTorch operations and O(Q x K) memory, which "
    "does"
)


def refuse_double_backward(ctx: Any, *_: Any) -> NoReturn:
    raise RuntimeError(
        "flash_dmattn: double backward is not supported, kernels have no second derivative; "
        f"{_USE_REFERENCE}"
    )


def refuse_forward_mode(ctx: Any = None, *_: Any) -> NoReturn:
    raise RuntimeError(
        "flash_dmattn does not support forward-mode differentiation (torch.func.jvp, jacfwd, "
        f"hessian and linearize, torch.autograd.forward_ad); {_USE_REFERENCE}"
    )


def refuse_vmap(*_: Any) -> NoReturn:
    raise RuntimeError(
        "flash_dmattn does not support torch.vmap, which torch.func.jacrev and gradients for each "
        f"sample use; give the mapped dimension as a batch dimension, or {_USE_REFERENCE}"
    )


def current_backward() -> int:
    """Return the number of the backward pass that calls, or -1; compiled code is not told."""
    return -1 if torch.compiler.is_compiling() else torch._C._current_graph_task_id()


def refuse_recomputation(name: str, made_during: int) -> None:
    """Raise RuntimeError where a backward pass would change a state that it has found.

    Args:
        name: of the state.
        made_during: what `current_backward` returned when the state was made.
    """
    if current_backward() not in (-1, made_during):
        raise RuntimeError(
            f"{name} cannot be changed during a backward pass: activation checkpointing calls a "
            "function again there, and tokens would be taken in twice; change it outside of the "
            "checkpointed function, or make it inside"
        )
