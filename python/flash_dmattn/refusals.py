# SPDX-License-Identifier: BSD-3-Clause
"""What kernels cannot differentiate or map, in the words of the errors."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["refuse_double_backward", "refuse_forward_mode", "refuse_vmap"]

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
