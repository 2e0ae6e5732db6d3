# SPDX-License-Identifier: BSD-3-Clause
"""What torch's dispatcher is in the middle of: tracing, modes, functorch transforms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["IS_READABLE", "forward_mode_is_compiled", "is_idle", "is_transformed"]

_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})


def _legacy_vmap() -> Any:
    """Return the key that is in force while the older vmap runs, as is_grads_batched does."""
    try:
        return torch._C._dispatch_key_parse("VmapMode")
    except (AttributeError, RuntimeError):
        return None


_LEGACY_VMAP = _legacy_vmap()

# These are not public: without them every call takes the way that is right for all.
IS_READABLE = (
    _LEGACY_VMAP is not None
    and hasattr(torch._C, "_dispatch_tls_is_dispatch_key_included")
    and hasattr(torch._C, "_len_torch_dispatch_stack")
    and hasattr(torch._C, "_functorch")
    and hasattr(torch._C._functorch, "peek_interpreter_stack")
    and hasattr(forward_ad, "_current_level")
)
# Each dot costs a small call as much as the question behind it.
if IS_READABLE:
    _dispatch_modes = torch._C._len_torch_dispatch_stack
    _is_in_force = torch._C._dispatch_tls_is_dispatch_key_included
    _transform = torch._C._functorch.peek_interpreter_stack


def is_idle(tensors: tuple[Any, ...]) -> bool:
    """Say whether the dispatcher, most of the cost of a small call, would have nothing to do.

    That is: plain tensors, and no tracing, dispatch mode or functorch transform.
    """
    if torch.compiler.is_compiling() or not IS_READABLE:
        return False
    if _dispatch_modes() or _transform_is_active() or _is_in_force(_LEGACY_VMAP):
        return False
    # Meta tensors have no data to compute on; the fake kernels give their results. All tensors of a
    # call are on one device.
    if tensors[0].is_meta:
        return False
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN_TYPES or tensor.is_neg()):
            return False
    return True


def is_transformed() -> bool:
    """Say whether torch.func or forward-mode differentiation is at work.

    The autograd formula of an operator serves neither: torch.func refuses it, and a tangent is
    dropped. Where torch does not tell, the answer is yes, since what serves both serves all.
    """
    if torch.compiler.is_compiling():
        return False
    return not IS_READABLE or _transform_is_active()


def _transform_is_active() -> bool:
    return _transform() is not None or forward_ad._current_level >= 0


def forward_mode_is_compiled() -> bool:
    """Say whether the compiler traces a call that would lose its tangents.

    It cannot trace what refuses them elsewhere, and reads only this of the state.
    """
    return torch.compiler.is_compiling() and IS_READABLE and forward_ad._current_level >= 0
