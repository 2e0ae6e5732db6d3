# SPDX-License-Identifier: BSD-3-Clause
"""The state of torch's dispatcher: tracing, modes, profilers, functorch transforms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._device import DeviceContext

# Tensors of any other type may override operations.
PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})
_NAMESPACES = ("flash_dmattn/", "_/")  # this library's operators, and fallbacks for all operators


def _is_readable() -> bool:
    """Say whether this torch has all private names that this module reads.

    Without them every call takes the general path, which is always correct.
    """
    core = torch._C
    wanted = (
        (core, "DispatchKeySet"),
        (core, "_dispatch_tls_local_include_set"),
        (core, "_dispatch_tls_is_dispatch_key_excluded"),
        (core, "_len_torch_function_stack"),
        (core, "_get_function_stack_at"),
        (core, "_is_tracing"),
        (core, "_autograd"),
        (getattr(core, "_autograd", None), "_profiler_enabled"),
        (core, "_functorch"),
        (getattr(core, "_functorch", None), "peek_interpreter_stack"),
        (forward_ad, "_current_level"),
        (torch.library, "_impls"),
    )
    return all(hasattr(place, name) for place, name in wanted)


IS_READABLE = _is_readable()
# Bound once: in small calls an attribute lookup costs as much as the query itself.
if IS_READABLE:
    _KEY = torch._C.DispatchKey
    _AUTOGRAD = _KEY.AutogradFunctionality
    _is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    _included_keys = torch._C._dispatch_tls_local_include_set
    # The included keys of an idle thread, outside of and in inference mode. Everything else changes
    # the set: dispatch modes (also those before dispatch), functorch, both kinds of vmap,
    # torch.jit.trace, functionalization, the Python dispatcher, keys that a guard includes.
    _INFERENCE_KEYS = torch._C.DispatchKeySet(_KEY.BackendSelect)
    _IDLE_KEYS = (_INFERENCE_KEYS.add(_KEY.ADInplaceOrView), _INFERENCE_KEYS)
    _function_modes = torch._C._len_torch_function_stack
    _is_jit_tracing = torch._C._is_tracing
    _is_profiled = torch._C._autograd._profiler_enabled
    _transform = torch._C._functorch.peek_interpreter_stack
    _kernels: set[str] = torch.library._impls


class _Kernels:
    """State of the kernels that are registered with torch.library."""

    names: frozenset[str] = frozenset()
    # Whether the dispatcher would call this library's kernels, so that calls may bypass it. It
    # would not if torch.library holds other kernels for these operators. Kernels that C++ registers
    # for CPUs or CUDA devices are not detected.
    has_only_own = False
    count_at_check = -1  # number of kernels of all operators at the last check


def watch_kernels(library: torch.library.Library) -> None:
    """Treat the kernels of ``library`` as own, and all others for its operators as foreign."""
    _Kernels.names = frozenset(getattr(library, "_op_impls", ()))


def _count_kernels() -> None:
    _Kernels.count_at_check = len(_kernels)
    relevant = [name for name in tuple(_kernels) if name.startswith(_NAMESPACES)]
    _Kernels.has_only_own = _Kernels.names.issuperset(relevant)


def is_idle(tensors: tuple[Any, ...], *, or_profiled: bool = False) -> bool:
    """Say whether the dispatcher, most of the cost of a small call, would have nothing to do.

    With ``or_profiled``, also return True if it would only notify a profiler.

    The conditions: plain tensors of a CPU or a CUDA device, the library's own kernels, and no
    tracing, mode, profiler or functorch transform. One recorder cannot be detected: a
    torch.profiler.ExecutionTraceObserver that is started without a profiler.
    """
    if is_compiling() or not IS_READABLE:
        return False
    if _included_keys() not in _IDLE_KEYS or forward_ad._current_level >= 0:
        return False
    if not or_profiled and _is_profiled():
        return False
    if len(_kernels) != _Kernels.count_at_check:
        _count_kernels()
    if not _Kernels.has_only_own or (_function_modes() and _has_function_mode()):
        return False
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in PLAIN_TYPES or tensor.is_neg()):
            return False
    # All tensors of a call are on one device. Other devices may have kernels of their own. Meta
    # tensors have no data, so fake kernels must compute their results.
    first = tensors[0]
    return first is not None and (first.is_cpu or first.is_cuda)


def _has_function_mode() -> bool:
    """Say whether a torch function mode is on that may observe calls.

    The mode of torch.set_default_device is ignored: it only changes functions that make tensors.
    """
    modes = (torch._C._get_function_stack_at(level) for level in range(_function_modes()))
    return any(type(mode) is not DeviceContext for mode in modes)


def is_below_autograd() -> bool:
    """Say whether the caller is a kernel or a dispatch mode, for which nothing is recorded.

    Call this only after is_idle has returned True.
    """
    return _is_excluded(_AUTOGRAD)


def is_recorded_by_jit() -> bool:
    """Say whether torch.jit.trace records the calls, or this cannot be determined.

    torch.jit.is_tracing reads the same state but has no type annotations.
    """
    return not is_compiling() and (not IS_READABLE or _is_jit_tracing())


def is_transformed() -> bool:
    """Say whether torch.func or forward-mode differentiation is active.

    The autograd formula of an operator supports neither: torch.func refuses it, and tangents are
    dropped. If the state is not readable the answer is True: the path for both serves all calls.
    """
    if is_compiling():
        return False
    return not IS_READABLE or _transform() is not None or forward_ad._current_level >= 0


def has_values(tensor: Tensor) -> bool:
    """Say whether the host can read a tensor: it is not meta or fake, and make_fx does not trace.

    Compiled code can read values, with a graph break.
    """
    if tensor.is_meta or is_compiling():
        return not tensor.is_meta
    return type(tensor) is not FakeTensor and get_proxy_mode() is None


def is_checkable(tensor: Tensor) -> bool:
    """Say whether a check may read a tensor: it is on a CPU, so the read does not synchronize.

    Compiled, traced and transformed code is excluded, since it also serves other values.
    """
    if not tensor.is_cpu or is_compiling() or is_transformed():
        return False
    return type(tensor) in PLAIN_TYPES and has_values(tensor)


def forward_mode_is_compiled() -> bool:
    """Say whether the compiler traces a call that would lose its tangents.

    The compiler cannot trace the code that refuses tangents, and reads only this part of the state.
    """
    return is_compiling() and IS_READABLE and forward_ad._current_level >= 0
