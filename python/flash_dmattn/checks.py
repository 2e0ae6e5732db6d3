# SPDX-License-Identifier: BSD-3-Clause
"""Checks of single arguments. Each error names the argument, its value and the allowed values."""

from __future__ import annotations

import operator
from typing import Any, NoReturn

import torch
from torch import Tensor

from .dispatch_state import has_values

# IntervalMask and cu_seqlens store row and key counts as int32.
MAX_ROWS = 2**31 - 1
_INT64_MAX = 2**63 - 1
_LONGEST_TEXT = 60
_SCALARS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_STRIDED = torch.strided
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64})


def described(value: object) -> str:
    """Describe an argument in a few words, without values of tensors, arrays and collections."""
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        if value.is_nested:
            return f"a nested {value.dtype} tensor"
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    kind = type(value).__name__
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, _SCALARS):
        return _shortened(value)
    if _is_array(value):
        return f"{kind} of shape {value.shape} and dtype {value.dtype}"  # type: ignore[attr-defined]
    if isinstance(value, (list, tuple, dict, set)):
        return f"{kind} of length {len(value)}"
    return f"{kind} object"


def _shortened(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 8 * _LONGEST_TEXT // 4:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print the largest
    text = repr(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."


def _is_array(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "shape")


def refuse_type(name: str, allowed: str, value: object) -> NoReturn:
    """Raise TypeError for an argument of a type that is not allowed."""
    if isinstance(value, torch.fx.Proxy):
        raise TypeError(
            f"{name} must be {allowed}, got a torch.fx.Proxy: symbolic tracing cannot look into "
            "flash_dmattn; make the function that you call a leaf with torch.fx.wrap, or use "
            "torch.export.export"
        )
    hint = ""
    if _is_array(value) and "Tensor" in allowed:
        hint = f"; torch.from_numpy({name}) makes a tensor of it"
    got = described(value)
    kind = type(value).__name__
    # Name the type of a scalar: its value, such as 3, does not show it.
    if "Tensor" in allowed and isinstance(value, _SCALARS):
        got = f"{kind}: {got}"
    raise TypeError(f"{name} must be {allowed}, got {got}{hint}")


def tensor(name: str, value: Any, allowed: str = "a torch.Tensor") -> Tensor:
    """Return a tensor argument.

    Raises:
        TypeError: value is not a tensor, or not a strided one.
    """
    if not isinstance(value, Tensor):
        refuse_type(name, allowed, value)
    if value.layout is not _STRIDED or value.is_nested:
        refuse_layout(name, value)
    return value


def refuse_layout(name: str, value: Tensor) -> NoReturn:
    """Raise TypeError for a tensor that is sparse, nested, or of another layout."""
    if value.is_nested:
        raise TypeError(
            f"{name} must be a dense torch.Tensor, got a nested one; flash_dmattn_varlen_func "
            "takes sequences of different lengths: values(), and int32 offsets() as cu_seqlens"
        )
    raise TypeError(
        f"{name} must be a torch.Tensor of layout torch.strided, got {value.layout}; "
        f"{name}.to_dense() is one"
    )


def same_device(name: str, value: Tensor, place: str, device: torch.device) -> None:
    """Raise ValueError unless a tensor is on ``device``, the device of ``place``."""
    if value.device != device:
        raise ValueError(f"{name} must be on {place} {device}, got a tensor on {value.device}")


def read_max_seqlen(name: str, cu_seqlens: Tensor, instead: str = "") -> int:
    """Return the length of the longest packed sequence. This reads the device."""
    check_values(name, cu_seqlens, instead)
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    return value_of(lengths.max().clamp(min=0)) if lengths.numel() else 0


def value_of(number: Tensor) -> int:
    """Return the value of an integer tensor of one element.

    torch.export, in whose programs it differs from call to call, refuses int() of such a tensor.
    """
    value: int = number.item()  # type: ignore[assignment]
    return value


def check_values(name: str, value: Tensor, instead: str = "") -> None:
    """Raise ValueError for a tensor whose values the host needs but cannot read."""
    if not has_values(value):
        kind = "a meta tensor" if value.is_meta else "a fake or traced tensor"
        raise ValueError(f"{name} must have values that can be read, got {kind}{instead}")


def is_one_of(size: int, *allowed: int) -> bool:
    """Say whether a size is among the allowed ones.

    Compiled code must not evaluate ``size in (1, batch)``: torch.compile (2.13) gives a wrong
    answer once it has specialized a symbolic size.
    """
    for other in allowed:  # noqa: SIM110 - what every version of the compiler traces
        if size == other:
            return True
    return False


def cu_seqlens(name: str, value: Any) -> Tensor:
    """Return a cu_seqlens argument. Its values are checked where they are read."""
    bounds = tensor(name, value)
    if bounds.dtype != torch.int32:
        raise TypeError(f"{name} must have dtype torch.int32, got {bounds.dtype}")
    if bounds.dim() != 1 or bounds.shape[0] < 1:
        raise ValueError(f"{name} must have shape (B + 1,), got {tuple(bounds.shape)}")
    return bounds


def index(name: str, value: Any, minimum: int = -_INT64_MAX - 1, maximum: int = _INT64_MAX) -> int:
    """Return an integer argument, kept symbolic under torch.compile.

    Raises:
        TypeError: it is not an integer, or it is a bool.
        ValueError: it is below ``minimum`` or above ``maximum``. Compiled code does not check this.
    """
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        raise TypeError(f"{name} must be an integer, got {described(value)}")
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    if not isinstance(value, int):
        try:
            value = int(operator.index(value))
        except (TypeError, RuntimeError):
            hint = ""
            if name == "window_size" and isinstance(value, tuple):
                hint = "; IntervalMask.sliding_window(left, right, ...) makes an attn_mask"
            raise TypeError(f"{name} must be an integer, got {described(value)}{hint}") from None
    if torch.compiler.is_compiling() or minimum <= value <= maximum:
        length: int = value
        return length
    wanted = f"at least {minimum}" if value < minimum else f"at most {maximum}"
    raise ValueError(f"{name} must be {wanted}, got {described(value)}")


def number(name: str, value: Any, alternative: str = " or None") -> float:
    """Return a float argument.

    Raises:
        TypeError: it is not a number, or it is a tensor that requires a gradient.
        ValueError: it exceeds the range of float.
    """
    if isinstance(value, Tensor) and value.requires_grad:
        raise TypeError(
            f"{name} must be a number, got a tensor that requires a gradient, which it would not "
            "get; to learn a scale, multiply query by it"
        )
    try:
        if not isinstance(value, (str, bytes, bytearray, bool)):
            return float(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    except OverflowError:
        raise ValueError(f"{name} must be finite, got {described(value)}") from None
    raise TypeError(f"{name} must be a number{alternative}, got {described(value)}")


def flag(name: str, value: Any) -> bool:
    """Return a boolean argument; None is False. Raise TypeError for any other value."""
    if value is None or value is False:
        return False
    if value is True:
        return True
    if isinstance(value, (int, torch.SymBool)) and value in (0, 1):
        return bool(value)
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise TypeError(f"{name} must be True, False or None, got {described(value)}")


def device(name: str, value: Any) -> torch.device | None:
    """Return a device argument; None stays None.

    Raises:
        TypeError: it is neither a name, a number nor a torch.device.
        ValueError: no device has this name or number.
        RuntimeError: torch cannot use such a device here.
    """
    if value is None or torch.compiler.is_compiling():
        return value  # type: ignore[no-any-return]
    if isinstance(value, bool) or not isinstance(value, (str, int, torch.device)):
        refuse_type(name, "a torch.device, its name, or None", value)
    try:
        found = torch.device(value)
    except (RuntimeError, ValueError, OverflowError):
        raise ValueError(f"{name} must name a device of torch, got {described(value)}") from None
    is_available = getattr(getattr(torch, found.type, None), "is_available", None)
    if is_available is not None and not is_available():
        raise RuntimeError(
            f"{name} is {str(found)!r}, which torch {torch.__version__} cannot use here"
        )
    count = getattr(getattr(torch, found.type, None), "device_count", None)
    if count is not None and found.index is not None and found.index >= count():
        raise ValueError(
            f"{name} is {str(found)!r}, but must be one of the {count()} {found.type} devices here"
        )
    return found
