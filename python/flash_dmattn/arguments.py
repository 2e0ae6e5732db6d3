# SPDX-License-Identifier: BSD-3-Clause
"""Argument checks and conversions that need torch. The core checks shapes and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, overload

import torch
from torch import Tensor

from . import checks
from .checks import flag, number
from .loader import environment
from .masks import IntervalMask
from .operators import define
from .record import MaskBlocks

__all__ = [
    "MaskParts",
    "any_autocast",
    "autocast",
    "autocast_dtype",
    "backend_name",
    "check_packed_ranks",
    "check_tensors",
    "check_together",
    "has_autocast",
    "is_block_mask",
    "mask_parts",
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
    """Do the same as `check_tensors`, for a first tensor that is not named query."""
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
    """Raise TypeError if dtypes are mixed, or a backend other than reference gets float64."""
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


# The device types of torch itself. Those of other packages may come and be named at any time.
_AUTOCAST_DEVICES = frozenset(
    name
    for name in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "xla")
    if torch.amp.is_autocast_available(name)
)


def has_autocast(device_type: str) -> bool:
    """Say whether torch.autocast serves a device type."""
    if device_type in _AUTOCAST_DEVICES:
        return True
    try:
        torch.autocast(device_type, enabled=False)
    except (AssertionError, RuntimeError):  # such as meta, or what its package did not register
        return False
    return True


# Compiled code cannot ask for it; see _default_deterministic.
has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _any_device_autocasts() -> bool:
    return any(map(torch.is_autocast_enabled, _AUTOCAST_DEVICES))


# Whether autocast is enabled for any device type. The function for all types at once is private.
any_autocast: Callable[[], bool] = getattr(
    torch._C, "_is_any_autocast_enabled", _any_device_autocasts
)


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype that torch.autocast casts to on a tensor's device; None if it is off."""
    # Dynamo of some torch versions cannot trace any_autocast.
    if not torch.compiler.is_compiling() and not any_autocast():
        return None
    device = tensor.device.type
    if not (has_autocast(device) and torch.is_autocast_enabled(device)):
        return None
    return torch.get_autocast_dtype(device)


def autocast(query: Tensor, key: Tensor, value: Tensor, *added: Tensor | None) -> tuple[Any, ...]:
    """Cast as torch.autocast does, where it is enabled.

    query, key and value are cast. Of the added tensors (a bias, a sink), those of float32 stay.
    float64, integers and booleans stay, as under autocast in general.
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
    """Return the operator's name for a backend argument."""
    if backend is None:
        return "auto"
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a string or None, got {checks.described(backend)}")
    return backend


def _default_deterministic() -> bool:
    name = "FLASH_DMATTN_DETERMINISTIC"
    return environment.is_given(name) and environment.get(name) == "1"


# torch.compiler.assume_constant_result sets the same mark, but its call imports torch._dynamo,
# which would add a second to the import of flash_dmattn.
_default_deterministic._dynamo_marked_constant = True  # type: ignore[attr-defined]


def resolved_deterministic(deterministic: bool | None) -> bool:
    """Return the argument. None resolves to True if FLASH_DMATTN_DETERMINISTIC or
    torch.use_deterministic_algorithms asks for determinism.
    """
    if deterministic is not None:
        return flag("deterministic", deterministic)
    return torch.are_deterministic_algorithms_enabled() or _default_deterministic()


def scale_of(softmax_scale: float | None, query: Tensor) -> float:
    """Return the scale of the scores; by default ``D ** -0.5`` of query's head dimension D."""
    if softmax_scale is not None:
        return number("softmax_scale", softmax_scale)
    head_dim = query.shape[-1]
    return float(head_dim**-0.5) if head_dim else 1.0


def to_4d(name: str, tensor: Tensor, *, batch: int, heads: int, kv_heads: int, keys: int) -> Tensor:
    """View a mask or bias that is the same for every query, (B, K) or (B, h, K), as (B, h, 1, K).

    Only the heads broadcast. A batch size or key count of 1 is more often a mistake, for example
    the mask of only the new token in decoding. Four dimensions state the intent explicitly.

    Raises:
        ValueError: such a tensor does not fit. The backend checks 4-D tensors.
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
    # view() takes half the time of an index with two Nones.
    return tensor.unsqueeze(2) if rank == 3 else tensor.view(sizes[0], 1, 1, sizes[1])


class MaskParts(NamedTuple):
    """A mask as the fields of a record: a mask, or start and end, or neither."""

    mask: Tensor | None = None
    start: Tensor | None = None
    end: Tensor | None = None
    max_kept: int = 0  # set with start and end only
    keeps_runs: bool = False  # set with start and end only


def mask_parts(mask: Tensor | IntervalMask | MaskBlocks | None) -> MaskParts:
    """Return the fields of a mask. Blocks are for calls with their plan."""
    if isinstance(mask, MaskBlocks):
        return MaskParts(mask.field)
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
    """Narrow expanded (stride 0) dimensions among the first ones to size 1.

    The values stay the same, and one key list serves all heads or rows. A tensor that requires a
    gradient is returned as it is, because its gradient has its shape.
    """
    if tensor is None:
        return tensor
    is_compiled = torch.compiler.is_compiling()
    # Under torch.compile (2.13) stride() fails on tensors of data-dependent sizes.
    strides = torch.ops.aten.sym_stride.default(tensor) if is_compiled else tensor.stride()
    if 0 not in strides or (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    for dimension in range(dimensions):
        if strides[dimension] == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def writable(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy of an inference tensor. Inference mode must be off here.

    torch.compile cannot query ``is_inference()``. Compiled code copies each tensor that requires
    no gradient by an operator, whose kernel can leave inference mode.
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
    """Raise ValueError unless packed tensors have the required rank."""
    if query.dim() != 3:
        raise ValueError(f"query must have shape (total_q, H, D), got {tuple(query.shape)}")
    if key.dim() != (4 if paged else 3):
        form = "(pages, page, Hk, D) with block_table" if paged else "(total_k, Hk, D)"
        raise ValueError(f"key must have shape {form}, got {tuple(key.shape)}")


def refuse_paged_gradients(*tensors: Tensor | None) -> None:
    """Raise ValueError if a call with pages would need gradients."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise ValueError(
            "block_table: paged keys and values are for inference, and have no gradient; call "
            "under torch.no_grad(), or pass packed key and value"
        )


def refuse_paged_mass() -> NoReturn:
    """Raise ValueError for return_key_mass in a call with pages."""
    raise ValueError(
        "return_key_mass must be False with block_table: the pages do not tell how many keys there "
        "are; pass packed key and value"
    )


def is_block_mask(mask: object) -> bool:
    """Say whether a mask is a BlockMask, without importing its class, which takes seconds."""
    return type(mask) is not Tensor and hasattr(mask, "kv_num_blocks")
