# SPDX-License-Identifier: BSD-3-Clause
"""Checks and conversions that need torch; the core checks what shapes and dtypes must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, overload

import torch
from torch import Tensor

from . import checks
from .checks import flag, index, number
from .loader import environment
from .masks import IntervalMask
from .operators import define

__all__ = [
    "MaskParts",
    "any_autocast",
    "autocast",
    "autocast_dtype",
    "backend_name",
    "check_packed_ranks",
    "check_tensors",
    "check_together",
    "flag",
    "index",
    "is_block_mask",
    "mask_parts",
    "number",
    "refuse_paged_gradients",
    "refuse_paged_mass",
    "refuse_ranks",
    "resolved_deterministic",
    "scale_of",
    "to_4d",
    "without_expansion",
    "writable",
]


_NEEDED = frozenset({"key", "value"})
_ALLOWED = {"attn_mask": "a boolean torch.Tensor, an IntervalMask or None"}


def check_tensors(query: Tensor, **others: Any) -> None:
    """Raise unless all arguments are tensors (or None, or masks) on query's device.

    Raises:
        TypeError: an argument is something else, or a tensor that is not strided.
        ValueError: an argument is on another device.
    """
    checks.tensor("query", query)
    check_together("query", query, others)


def check_together(first: str, tensor: Tensor, others: dict[str, Any]) -> None:
    """Do what `check_tensors` does where the first tensor has another name."""
    device = tensor.device
    for name, argument in others.items():
        if argument is None:
            if name in _NEEDED:
                raise TypeError(f"{name} must be a torch.Tensor, got None")
            continue
        if isinstance(argument, IntervalMask):
            if name != "attn_mask":
                raise TypeError(f"{name} must be a torch.Tensor, got an IntervalMask")
            other = argument.start
        else:
            other = checks.tensor(name, argument, _ALLOWED.get(name, "a torch.Tensor"))
        if other.device != device:
            raise ValueError(
                f"{name} must be on {first}'s device {device}, got a tensor on {other.device}"
            )


def check_dtypes(query: Tensor, key: Tensor, value: Tensor, backend: str) -> None:
    """Raise TypeError if dtypes are mixed, or float64 is asked of a kernel pack."""
    dtype = query.dtype
    if key.dtype != dtype or value.dtype != dtype:
        raise TypeError(
            f"query, key and value must have one dtype, got query {dtype}, key {key.dtype} and "
            f"value {value.dtype}"
        )
    if dtype == torch.float64 and backend != "reference":
        raise TypeError(
            "query has dtype torch.float64, which kernels do not compute in; convert to "
            "torch.float32, or pass "
            'backend="reference" for the plain PyTorch formula'
        )


# Torch refuses to say whether autocast is enabled for a device type without it, such as meta, and
# compiled code cannot ask which types have it.
_AUTOCAST_DEVICES = frozenset(
    name
    for name in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia")
    if torch.amp.is_autocast_available(name)
)


def _ask_each_device() -> bool:
    return any(map(torch.is_autocast_enabled, _AUTOCAST_DEVICES))


# Whether it is enabled for any device type. What asks for all at once is not public.
any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", _ask_each_device)


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return what torch.autocast casts to on a tensor's device, or None where it is off."""
    # Not every version's compiler knows the function.
    if not torch.compiler.is_compiling() and not any_autocast():
        return None
    device = tensor.device.type
    if device not in _AUTOCAST_DEVICES or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def autocast(query: Tensor, key: Tensor, value: Tensor, *added: Tensor | None) -> tuple[Any, ...]:
    """Cast as torch.autocast does, where it is enabled: query, key, value, and of what is added to
    scores, a bias and a sink, what is not float32.

    float64, integers and booleans are left alone, as autocast leaves them everywhere.
    """
    dtype = autocast_dtype(query)
    if dtype is None:
        return query, key, value, *added
    query, key, value = (_cast(t, dtype) for t in (query, key, value))
    return (
        query,
        key,
        value,
        *(t if t is None or t.dtype == torch.float32 else _cast(t, dtype) for t in added),
    )


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def backend_name(backend: str | None) -> str:
    """Return the operator's name of a backend argument."""
    if backend is None:
        return "auto"
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a string or None, got {checks.described(backend)}")
    return backend


def _default_deterministic() -> bool:
    name = "FLASH_DMATTN_DETERMINISTIC"
    return environment.is_given(name) and environment.get(name) == "1"


# What torch.compiler.assume_constant_result does; but calling that imports torch._dynamo, which
# takes a second that no one who does not compile should pay for importing flash_dmattn.
_default_deterministic._dynamo_marked_constant = True  # type: ignore[attr-defined]


def resolved_deterministic(deterministic: bool | None) -> bool:
    """Return the argument; by default whether FLASH_DMATTN_DETERMINISTIC or
    torch.use_deterministic_algorithms asks for it.
    """
    if deterministic is not None:
        return flag("deterministic", deterministic)
    return torch.are_deterministic_algorithms_enabled() or _default_deterministic()


def scale_of(softmax_scale: float | None, query: Tensor) -> float:
    """Return the factor of scores; by default what the head dimension tells."""
    if softmax_scale is not None:
        return number("softmax_scale", softmax_scale)
    head_dim = query.shape[-1]
    return float(head_dim**-0.5) if head_dim else 1.0


def to_4d(name: str, tensor: Tensor, *, batch: int, heads: int, kv_heads: int, keys: int) -> Tensor:
    """View a mask or bias that is the same for every query, (B, K) or (B, h, K), as (B, h, 1, K).

    Only the heads are broadcast: a mask of one key, or of one sequence, among several is more often
    a mistake, such as that of the new token alone in decoding. Four dimensions say what is meant.

    Raises:
        ValueError: such a tensor does not fit; what has four dimensions is checked by the backend.
    """
    if tensor.dim() == 4:
        return tensor
    if tensor.dim() not in (2, 3):
        raise ValueError(
            f"{name} must have shape ({{B|1}}, {{H|Hk|1}}, {{Q|1}}, {{K|1}}), (B, {{H|Hk|1}}, K) "
            f"or (B, K), got {tuple(tensor.shape)}"
        )
    rank, sizes = tensor.dim(), tensor.shape
    if (
        sizes[0] != batch
        or (rank == 3 and not checks.is_one_of(sizes[1], 1, kv_heads, heads))
        or sizes[-1] != keys
    ):
        head_choice = "|".join(map(str, dict.fromkeys((heads, kv_heads, 1))))
        wanted = (
            f"(B, K) = ({batch}, {keys})"
            if rank == 2
            else f"(B, {{H|Hk|1}}, K) = ({batch}, {{{head_choice}}}, {keys})"
        )
        raise ValueError(
            f"{name} with {rank} dimensions must have shape {wanted}, got {tuple(sizes)}; only "
            f"with four dimensions are sizes of 1 broadcast, as of {name}[None, None], (1, 1, Q, K)"
        )
    # A view of two dimensions takes half the time of an index with two Nones.
    return tensor.unsqueeze(2) if rank == 3 else tensor.view(sizes[0], 1, 1, sizes[1])


class MaskParts(NamedTuple):
    """A mask in the fields of a record: a mask, or start and end, or none of them."""

    mask: Tensor | None = None
    start: Tensor | None = None
    end: Tensor | None = None
    max_kept: int = 0  # of start and end
    keeps_runs: bool = False  # likewise


def mask_parts(mask: Tensor | IntervalMask | None) -> MaskParts:
    """Return the fields of a mask."""
    if isinstance(mask, IntervalMask):
        return MaskParts(None, mask.start, mask.end, mask.max_kept or 0, mask._keeps_runs)
    if mask is not None and mask.dtype != torch.bool:
        hint = ""
        if mask.is_floating_point():
            hint = '; attn_bias is what is added to the scores, -inf being "not kept"'
        raise TypeError(
            f"attn_mask must have dtype torch.bool (True keeps the key), got {mask.dtype}{hint}"
        )
    return MaskParts(mask)


@overload
def without_expansion(tensor: Tensor, dimensions: int) -> Tensor: ...
@overload
def without_expansion(tensor: Tensor | None, dimensions: int) -> Tensor | None: ...
def without_expansion(tensor: Tensor | None, dimensions: int) -> Tensor | None:
    """Narrow the first dimensions, where they are expanded (stride 0), to size 1.

    Expanded and not expanded mean the same; but one list per head, or per row, is not made where
    one serves all. A tensor that needs a gradient is left alone, for its gradient has its shape.
    """
    if tensor is None:
        return tensor
    is_compiled = torch.compiler.is_compiling()
    # torch.compile (2.13) has no stride() of a tensor whose sizes it has found.
    strides = torch.ops.aten.sym_stride.default(tensor) if is_compiled else tensor.stride()
    if 0 not in strides or (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    for dimension in range(dimensions):
        if strides[dimension] == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def writable(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if it was made in inference mode, which must be off here.

    torch.compile cannot ask for that. Its programs copy what has no gradient by an operator, whose
    kernel can leave the mode in which they run.
    """
    if torch.compiler.is_compiling():
        is_copied = not tensor.requires_grad
        return torch.ops.flash_dmattn.writable_copy(tensor) if is_copied else tensor
    return tensor.clone() if tensor.is_inference() else tensor


def _contiguous_like(tensor: Tensor) -> Tensor:
    return tensor.new_empty(tensor.shape)


def _writable_copy(tensor: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return tensor.clone(memory_format=torch.contiguous_format)


define("writable_copy", ("Tensor tensor", "Tensor"), _writable_copy, _contiguous_like)


def refuse_ranks(**tensors: Tensor) -> NoReturn:
    """Raise ValueError for the first tensor that is not 4-D."""
    name, shape = next((n, tuple(t.shape)) for n, t in tensors.items() if t.dim() != 4)
    raise ValueError(f"{name} must have shape (B, rows, heads, D), got {shape}")


def check_packed_ranks(query: Tensor, key: Tensor, *, paged: bool) -> None:
    """Raise ValueError unless packed tensors have as many dimensions as they must."""
    if query.dim() != 3:
        raise ValueError(f"query must have shape (total_q, H, D), got {tuple(query.shape)}")
    if key.dim() != (4 if paged else 3):
        form = "(pages, page, Hk, D) with block_table" if paged else "(total_k, Hk, D)"
        raise ValueError(f"key must have shape {form}, got {tuple(key.shape)}")


def refuse_paged_gradients(*tensors: Tensor | None) -> None:
    """Raise ValueError where gradients would be wanted of a call with pages."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise ValueError(
            "block_table: paged keys and values are for inference, and have no gradient; call "
            "under torch.no_grad(), or pass packed key and value"
        )


def refuse_paged_mass() -> NoReturn:
    """Raise ValueError for what a call with pages does not compute."""
    raise ValueError(
        "return_key_mass must be False with block_table: the pages do not tell how many keys there "
        "are; pass packed key and value"
    )


def is_block_mask(mask: object) -> bool:
    """Say whether a mask is a BlockMask, without the seconds that importing its class takes."""
    return type(mask) is not Tensor and hasattr(mask, "kv_num_blocks")
