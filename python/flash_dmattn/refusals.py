# SPDX-License-Identifier: BSD-3-Clause
"""Errors for derivatives and transforms that kernels do not support."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from .operators import define

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


def current_backward() -> tuple[int, bool]:
    """Return the id of the running backward pass, or -1, and whether certainly none is running.

    Compiled code cannot determine the id.
    """
    if torch.compiler.is_compiling():
        return -1, False
    current = torch._C._current_graph_task_id()
    return current, current == -1


def refuse_recomputation(name: str, made_during: tuple[int, bool], counter: Tensor | None) -> None:
    """Raise RuntimeError if a backward pass would change a state that was made outside of it.

    Compiled code checks this at run time, and only if gradients are enabled, as in a recomputation.

    Args:
        name: of the state.
        made_during: the result of `current_backward` when the state was made.
        counter: integers of the state. The operator declares them as mutated, so that compilers
            keep the check. None: compiled code has no check.
    """
    backward, is_outside = made_during
    if not torch.compiler.is_compiling():
        _refuse_backward(counter, name, backward)
    elif torch.is_grad_enabled() and counter is not None and is_outside:
        torch.ops.flash_dmattn.refuse_recomputation(counter, name)


def _refuse_backward(counter: Tensor | None, name: str, allowed: int = -1) -> None:
    if torch._C._current_graph_task_id() not in (-1, allowed):
        raise RuntimeError(
            f"{name} cannot be changed during a backward pass: activation checkpointing calls a "
            "function again there, and tokens would be taken in twice; change it outside of the "
            "checkpointed function, or make it inside"
        )


# The schema declares counter as mutated: compilers drop operators that mutate and return nothing.
define(
    "refuse_recomputation",
    ("Tensor(a!) counter, str name", "()"),
    _refuse_backward,
    lambda counter, name: None,
)
