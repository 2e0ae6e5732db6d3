# SPDX-License-Identifier: BSD-3-Clause
"""Explanations of how an attention call is computed, without computing it."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import interface
from .arguments import is_block_mask
from .backends import select_backend
from .backends.base import has_readable_rows
from .backends.shapes import MAX_HEAD_DIM
from .checks import flag
from .ops import RecordedError
from .record import ATTENTION, KEY_LISTS, AttentionInputs, KeyListInputs, SelectionInputs
from .recorder import recorded_calls

__all__ = ["Explanation", "Obstacle", "explain"]


@dataclass(frozen=True)
class Obstacle:
    """A reason why a call takes a slower path, and its remedy."""

    reason: str
    fix: str


@dataclass(frozen=True)
class Explanation:
    """How a call is computed. ``str()`` gives a summary of a few lines."""

    backend: str  # as `get_available_backends` names it
    pack: str | None  # the name of the kernel pack and its file; None: the backend has none
    # For each step: its kernels, how they divide the work, and workspace in bytes, as the pack
    # reports. None: there is no such step, or the backend does not report it.
    selection: Mapping[str, Any] | None
    plan: Mapping[str, Any] | None
    forward: Mapping[str, Any] | None
    backward: Mapping[str, Any] | None
    gradients: tuple[str, ...]  # arguments whose gradients a backward pass would compute
    obstacles: tuple[Obstacle, ...]
    # The step that sums the attention each key received, for calls with return_key_mass.
    key_mass: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        """Return the text."""
        by = f", kernel pack {self.pack}" if self.pack else ""
        lines = [f"backend {self.backend}{by}"]
        for name in ("selection", "plan", "forward", "backward", "key_mass"):
            step = getattr(self, name)
            if step is not None:
                lines.append(f"  {name.replace('_', ' ') + ':':<11}{_describe_step(step)}")
        if self.backward is None:
            lines.append("  backward:  none, since no gradient is wanted")
        elif self.gradients:
            lines.append(f"  gradients: {', '.join(self.gradients)}")
        for obstacle in self.obstacles:
            lines += [f"  slower:    {obstacle.reason}", f"    fix: {obstacle.fix}"]
        return "\n".join(lines)


def explain(
    query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **named: Any
) -> Explanation:
    """Explain how a call would be computed: its backend and kernels, and what makes it slower.

    Nothing is computed or launched on a GPU, except for the conversion of a BlockMask.

    Args:
        query, key, value: as in the call.
        *arguments, **named: the other arguments of `flash_dmattn_func`, or of
            `flash_dmattn_varlen_func` if ``cu_seqlens_q`` is given by name.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: what the call would raise. Also
            RuntimeError in a function that torch.compile compiles.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("flash_dmattn.explain tells of calls as they run; call it uncompiled")
    packed = any(name in named for name in ("cu_seqlens_q", "cu_seqlens_k"))
    function: Callable[..., Any] = interface.flash_dmattn_func
    if packed:
        function = interface.flash_dmattn_varlen_func
    else:
        arguments, named = _with_plain_mask(query, key, arguments, named)
    inputs, name, keep = _recorded(function, (query, key, value, *arguments), named)
    width_obstacles = _width_obstacles(inputs, key, value)
    wants_mass = flag("return_key_mass", named.get("return_key_mass", False))
    if isinstance(inputs, KeyListInputs):
        gradients = _gradients(inputs, KEY_LISTS.differentiable)
        return _explain_lists(inputs, name, gradients, width_obstacles, wants_mass=wants_mass)
    chosen = select_backend(inputs.query.device, name)
    if inputs.window >= 0 and not chosen.selects():
        with recorded_calls():
            inputs = interface._select_mask(inputs, name)
    gradients = _gradients(inputs, ATTENTION.differentiable)
    copies = chosen.copies_rows(inputs, for_backward=bool(gradients))
    obstacles = (*width_obstacles, *_obstacles(inputs, chosen.name, name, copies=copies))
    key_mass = _kernel(chosen.key_mass_kernel(inputs)) if wants_mass else None
    description: dict[str, Any] = json.loads(chosen.describe(inputs, gradients, keep))
    pack = getattr(chosen, "pack", None)
    if pack is None:
        step = _kernel(f"those of the {chosen.name} backend")
        steps = (None, None, step, step if gradients else None)
        return Explanation(chosen.name, None, *steps, gradients, obstacles, key_mass)
    described_steps = {
        step: types.MappingProxyType(description[step]) if _is_step(description.get(step)) else None
        for step in ("selection", "plan", "forward", "backward")
    }
    return Explanation(
        chosen.name,
        f"{pack.name} ({pack.path})",
        **described_steps,
        gradients=gradients,
        obstacles=obstacles,
        key_mass=key_mass,
    )


# The arguments of flash_dmattn_func that follow value, in order.
_BEHIND_VALUE = tuple(inspect.signature(interface.flash_dmattn_func).parameters)[3:]


def _with_plain_mask(
    query: Tensor, key: Tensor, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with the BlockMask replaced by its plain mask, or by a plan of its blocks.

    That calls the mask_mod.
    """
    mask = arguments[0] if arguments else named.get("attn_mask")
    if not is_block_mask(mask) or named.get("plan") is not None:
        return arguments, named
    given = {**dict(zip(_BEHIND_VALUE, arguments, strict=False)), **named}
    names = ("attn_bias", "return_attn_probs", "is_causal", "backend")
    mask, plan = interface.convert_block_mask(
        mask,
        query,
        key,
        None,
        *map(given.get, names),
        selects=given.get("window_size") is not None,
    )
    named = {**named, "plan": plan}
    if arguments:
        return (mask, *arguments[1:]), named
    return arguments, {**named, "attn_mask": mask}


def _kernel(name: str) -> Mapping[str, Any]:
    """Return a step that reports only its kernel."""
    return types.MappingProxyType({"kernel": name})


def _recorded(
    function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[AttentionInputs | KeyListInputs, str, SelectionInputs | None]:
    """Return a call's record, its backend's name, and the selection of its mask if it has one.

    The call's own code makes them.
    """
    try:
        with recorded_calls() as selections:
            function(*arguments, **named)
    except RecordedError as record:
        return record.inputs, record.backend, selections[-1] if selections else None
    raise AssertionError("a call did not come to its computation")


def _explain_lists(
    inputs: KeyListInputs,
    requested: str,
    gradients: tuple[str, ...],
    width_obstacles: tuple[Obstacle, ...],
    *,
    wants_mass: bool,
) -> Explanation:
    """Explain a call whose queries list their keys."""
    from .key_lists.ops import (  # imported here: calls without lists do not need it
        check_call,
        serving_pack,
        uses_triton,
    )

    check_call(inputs, requested)
    is_triton, pack_backend = uses_triton(inputs, requested), serving_pack(inputs, requested)
    kernels: tuple[str, ...] = (
        "list_forward_kernel",
        "list_backward_kernel",
        "list_mass_kernel",
    )
    if not is_triton:
        kernels = ("PyTorch operations",) * 3
    if pack_backend is not None:
        pack_kernels = tuple(
            f"list_{which} of {pack_backend.pack.name}" for which in ("forward", "backward")
        )
        has_backward = serving_pack(inputs, requested, backward=True) is not None
        count = 2 if has_backward else 1
        kernels = (*pack_kernels[:count], *kernels[count:])
    forward, backward, key_mass = map(_kernel, kernels)
    obstacles = [*width_obstacles]
    if requested == "triton" and max(inputs.query.shape[-1], inputs.value.shape[-1]) > MAX_HEAD_DIM:
        obstacles.append(
            Obstacle(
                f"head dimensions above {MAX_HEAD_DIM} are computed by PyTorch operations",
                "there is no other way to compute them",
            )
        )
    elif requested == "triton" and not is_triton:
        obstacles.append(
            Obstacle(
                "deterministic calls with key_indices are computed by PyTorch operations",
                "pass deterministic=False where equal bits are not needed",
            )
        )
    elif not is_triton and pack_backend is None and inputs.query.is_cuda:
        obstacles.append(
            Obstacle(
                "PyTorch operations compute calls with key_indices unless a backend is named",
                'pass backend="triton" for kernels, and measure both',
            )
        )
    return Explanation(
        "triton" if is_triton else "reference" if pack_backend is None else pack_backend.name,
        pack=None
        if pack_backend is None
        else f"{pack_backend.pack.name} ({pack_backend.pack.path})",
        selection=None,
        plan=None,
        forward=forward,
        backward=backward if gradients else None,
        gradients=gradients,
        obstacles=tuple(obstacles),
        key_mass=key_mass if wants_mass else None,
    )


def _width_obstacles(
    inputs: AttentionInputs | KeyListInputs, key: Tensor, value: Tensor
) -> tuple[Obstacle, ...]:
    """Return the copies that a call needs if value's head dimension differs from key's."""
    of_key, of_value = key.shape[-1], value.shape[-1]
    if of_key == of_value or inputs.key.shape[-1] != inputs.value.shape[-1]:
        return ()
    narrow, scaled = "value", ""
    if of_key < of_value:
        narrow, scaled = "query and key", f", with softmax_scale={of_key}**-0.5"
    what = f"{narrow} {'is' if of_value < of_key else 'are'} padded with zeros"
    if inputs.block_table is not None:
        what = f"the pages of block_table are copied, and {what}"
    return (
        Obstacle(
            f"key has head dimension {of_key} and value {of_value}, so {what}",
            f"make {narrow} {max(of_key, of_value)} wide, the rest zeros, where it costs nothing"
            f"{scaled}",
        ),
    )


def _gradients(inputs: AttentionInputs | KeyListInputs, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the fields whose gradients a backward pass computes."""
    if not torch.is_grad_enabled():
        return ()
    fields = {name: getattr(inputs, name) for name in names}
    return tuple(name for name, t in fields.items() if t is not None and t.requires_grad)


def _obstacles(
    inputs: AttentionInputs, backend: str, requested: str, *, copies: bool
) -> Iterator[Obstacle]:
    """Return the properties of a call that make it slower; copies: rows are copied if need be."""
    head_dim = inputs.query.shape[-1]
    if requested != "auto" and backend not in ("cuda", "cpu"):
        yield Obstacle(
            f"backend={requested!r} was asked for, and kernel packs are faster",
            "leave backend out, which then follows the device",
        )
    if backend == "cuda":
        how = "are copied in each pass" if copies else "are read by elements"
        if head_dim % 8:
            wanted = -(-head_dim // 8) * 8
            yield Obstacle(
                f"head dimension {head_dim} is no multiple of 8, so query, key and value {how}",
                f"pad query, key and value with zeros to {wanted}, and pass softmax_scale="
                f"{head_dim}**-0.5",
            )
        else:
            for name in ("query", "key", "value"):
                if not has_readable_rows(getattr(inputs, name), 16):
                    yield Obstacle(
                        f"rows of {name} do not begin at multiples of 16 bytes, so they {how}",
                        f"pass {name}.contiguous()",
                    )
    mask = inputs.mask
    # Of a mask of blocks it has only the shape, and the plan the rest.
    if mask is not None and mask.dtype == torch.bool and _has_rows(mask, inputs):
        yield Obstacle(
            "attn_mask has a row for each query, so all of it is read",
            "if a key is kept by consecutive queries, pass an IntervalMask; window_size selects "
            "keys by a bias that is the same for every query",
        )
    if _has_rows(inputs.bias, inputs):
        yield Obstacle(
            "attn_bias has a row for each query, so all of it is read, and no key is left out",
            "if its rows are equal, pass one of them, with a query dimension of 1",
        )
    if (
        inputs.deterministic
        and backend == "cuda"
        and any(t.requires_grad for t in inputs[:3] if t is not None)
    ):
        yield Obstacle(
            "deterministic calls add up gradients in a fixed order, by one kernel after another",
            "pass deterministic=False where equal bits are not needed",
        )


def _has_rows(tensor: Tensor | None, inputs: AttentionInputs) -> bool:
    rank = 3 if inputs.packed else 4
    return tensor is not None and tensor.dim() == rank and tensor.shape[-2] > 1


def _is_step(step: dict[str, Any] | None) -> bool:
    return step is not None and step.get("kernel") != "none"


def _describe_step(step: Mapping[str, Any]) -> str:
    """Return a step as text."""
    kernels = step.get("launches", [step.get("kernel")])
    words = [", ".join(kernels) if kernels else "no launch of its own"]
    if "tile_rows" in step:
        words.append(f"tiles of {step['tile_rows']} rows and {step['tile_columns']} keys")
    division = step.get("division", {})
    if "block_keys" in division:
        words.append(
            f"blocks of {division['block_keys']} keys, {division['tile_rows']} rows a step"
        )
    if step.get("splits", 1) > 1:
        words.append(f"keys in {step['splits']} parts")
    for name, of in (("plan_bytes", "plan"), ("workspace_bytes", "workspace")):
        if step.get(name):
            words.append(f"{step[name]:,} bytes of {of}")
    return "; ".join(words)
