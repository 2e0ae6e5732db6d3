# SPDX-License-Identifier: BSD-3-Clause
"""The calls of FlexAttention: compiled on GPUs, in its plain form on CPUs."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask

from .blocks import BLOCK, Blocks, padded
from .problem import Problem, narrowed

_MIN_HEAD_DIM = 16


class Call(NamedTuple):
    """The arguments of FlexAttention; rows and keys are padded to whole blocks."""

    query: Tensor  # (B, H, Q, D)
    key: Tensor
    value: Tensor
    score_mod: Callable[..., Tensor]
    block_mask: BlockMask
    structure: tuple[Any, ...]  # compiled code is specific to this


def make_call(problem: Problem, blocks: Blocks, scale: float, softcap: float) -> Call:
    """Convert a problem to the tensors and functions that FlexAttention takes."""
    length, keys = padded(problem.query.shape[2]), padded(problem.key.shape[2])
    head_dim = max(_MIN_HEAD_DIM, 1 << (problem.query.shape[3] - 1).bit_length())
    query, key, value = (
        functional.pad(t, (0, head_dim - t.shape[3], 0, size - t.shape[2])).contiguous()
        for t, size in ((problem.query, length), (problem.key, keys), (problem.value, keys))
    )
    score_mod, mask_mod = _score_mod(problem, scale, softcap, keys), _mask_mod(problem, keys)
    block_mask = _block_mask(blocks, mask_mod, (length, keys))
    parts = (query, key, blocks.full, score_mod, mask_mod)
    structure = (query.device, head_dim, *problem.heads, *map(_structure, parts))
    return Call(query, key, value, score_mod, block_mask, structure)


def _structure(part: object) -> tuple[Any, ...]:
    """Return what code is compiled for: the functions' code, dtypes, and which sizes are 1.

    torch.compile treats a size of 1 as a constant, and all other sizes as variables.
    """
    if isinstance(part, Tensor):
        return part.dtype, *(size == 1 for size in part.shape)
    assert isinstance(part, types.FunctionType)
    captured = (cell.cell_contents for cell in part.__closure__ or ())
    return part.__code__, *map(_structure, captured)


def is_fused(device: torch.device) -> bool:
    """Say whether FlexAttention is compiled for a device.

    It has no gradients on a CPU. torch.compile does not run under a tracer of torch.fx.
    """
    return device.type != "cpu" and not _is_traced()


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """Return out ``(B, H, Q, D)`` and lse ``(B, H, Q)``, padded like the call."""
    if not is_fused(call.query.device):
        return _attend_uncompiled(call)
    compiled = _compile_for(call.structure, torch.is_grad_enabled())
    # Duck shapes would require sizes that are equal in the first call to be equal in all calls.
    with torch.fx.experimental._config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        out, lse = compiled(*call[:5])
    return out, lse


def differentiate(call: Call, dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value. This recomputes the forward pass."""
    leaves = [t.detach().requires_grad_() for t in call[:3]]
    with torch.enable_grad():
        results = attend(call._replace(query=leaves[0], key=leaves[1], value=leaves[2]))
    dquery, dkey, dvalue = torch.autograd.grad(results, leaves, (dout, dlse))
    return dquery, dkey, dvalue


def _attend_uncompiled(call: Call) -> tuple[Tensor, Tensor]:
    """Evaluate the same functions for all scores, in float32.

    FlexAttention's own uncompiled form traces each new combination of functions and sizes, gives up
    after a few, and does not run inside dispatch modes.
    """
    query, key, value = (t.float() for t in call[:3])
    (batch, heads, rows, _), (_, kv_heads, keys, _) = query.shape, key.shape
    b, h, i, j = (
        torch.arange(size, device=query.device).view(shape)
        for size, shape in (
            (batch, (-1, 1, 1, 1)),
            (heads, (-1, 1, 1)),
            (rows, (-1, 1)),
            (keys, (-1,)),
        )
    )
    key, value = (t.repeat_interleave(heads // kv_heads, 1) for t in (key, value))
    dropped = ~call.block_mask.mask_mod(b, h, i, j)
    scores = call.score_mod(query @ key.transpose(-1, -2), b, h, i, j)
    scores = scores.masked_fill(dropped, -torch.inf)
    # Softmax of a row that keeps no key is NaN.
    probabilities = torch.softmax(scores, -1).masked_fill(dropped, 0)
    return (probabilities @ value).to(call.query.dtype), torch.logsumexp(scores, -1)


def _attend_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: BlockMask,
) -> tuple[Tensor, Tensor]:
    is_grouped = query.shape[1] != key.shape[1]
    arguments = (query, key, value, score_mod, block_mask, 1.0, is_grouped)
    if _HAS_AUX_REQUEST:
        out, aux = flex.flex_attention(*arguments, return_aux=flex.AuxRequest(lse=True))
        return out, aux.lse
    out, lse = flex.flex_attention(*arguments, return_lse=True)
    return out, lse


# The function is private; its older name warns in versions that have the newer one.
_is_traced: Callable[[], bool] = getattr(
    torch.fx._symbolic_trace, "is_fx_symbolic_tracing", torch.fx._symbolic_trace.is_fx_tracing
)
_COMPILE_OPTIONS: dict[str, Any] = {"dynamic": True, "fullgraph": True}
# Versions without AuxRequest have return_lse, which warns in later versions.
_HAS_AUX_REQUEST = hasattr(flex, "AuxRequest")


@functools.cache
def _compile_for(structure: tuple[Any, ...], grad: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function that is compiled for a structure, and for any lengths.

    Each structure gets its own code object, because torch.compile limits recompilations per code.
    """
    code = types.FunctionType(
        _attend_with_lse.__code__.replace(), globals(), _attend_with_lse.__name__
    )
    compiled: Callable[..., tuple[Tensor, Tensor]] = torch.compile(code, **_COMPILE_OPTIONS)
    return compiled


def _planes(tensor: Tensor, problem: Problem) -> Tensor:
    """Return int32 ``(B, H)``: the index of the matrix of a tensor that serves each head.

    With these indices one compiled code serves tensors of all broadcast shapes.
    """
    batch, heads = tensor.shape[:2]
    number = torch.arange(batch * heads, dtype=torch.int32, device=tensor.device)
    number = number.view(batch, heads)
    if heads not in (1, problem.heads[0]):
        number = number.repeat_interleave(problem.heads[0] // heads, 1)
    return _without_base(number.expand(problem.query.shape[0], problem.heads[0]))


def _narrow(tensor: Tensor, problem: Problem) -> Tensor:
    return narrowed(tensor, packed=problem.first_key is not None)


def _expand_columns(tensor: Tensor, problem: Problem) -> Tensor:
    """Return ``(matrices, {Q|1}, columns)``, contiguous."""
    tensor = _narrow(tensor, problem)
    if tensor.shape[3] == 1 and problem.first_key is None:
        tensor = tensor.expand(*tensor.shape[:3], problem.key.shape[2])
    return _without_base(tensor.flatten(0, 1))


def _without_base(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor that is not a view: code also depends on a view's base."""
    return tensor.contiguous().detach()


def _score_mod(problem: Problem, scale: float, softcap: float, keys: int) -> Callable[..., Tensor]:
    # Tensors, so that numbers are not compiled in. They have a dimension, because captured 0-D
    # tensors are treated as numbers.
    factor, cap = (
        torch.full((problem.heads[0],), number, dtype=torch.float32, device=problem.query.device)
        for number in (scale, softcap)
    )

    def scaled(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score * factor[h]

    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return cap[h] * torch.tanh(score * factor[h] / cap[h])

    without_bias = capped if softcap > 0 else scaled
    if problem.bias is None:
        return without_bias
    plane, bias = (
        _planes(_narrow(problem.bias, problem), problem),
        _expand_columns(problem.bias, problem),
    )
    if bias.shape[1] == 1:
        per_key = functional.pad(bias.squeeze(1), (0, keys - bias.shape[2]))

        def with_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return without_bias(score, b, h, i, j) + _bound_bias(per_key[plane[b, h], j])

        return with_bias
    place = _places(problem, bias)

    def with_row_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        added = bias[(plane[b, h], *place(i, j))]
        return without_bias(score, b, h, i, j) + _bound_bias(added)

    return with_row_bias


def _bound_bias(bias: Tensor) -> Tensor:
    """Bound a bias so that scores times log2(e), as in the kernels, stay in float32's range.

    The bound is a literal, because a global would become a variable of the compiled code.
    """
    return bias.to(torch.float32).clamp(min=-2.0e38)


def _mask_mod(problem: Problem, keys: int) -> Callable[..., Tensor]:
    start, end = (
        functional.pad(t.flatten(0, 1), (0, keys - t.shape[2])).contiguous()
        for t in (problem.start, problem.end)
    )
    interval = _planes(problem.start, problem)

    def in_interval(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        number = interval[b, h]
        return (start[number, j] <= i) & (i < end[number, j])

    mask_mod = in_interval
    for tensor in problem.rows:
        mask_mod = _and_mask(mask_mod, tensor, problem)
    return mask_mod


def _and_mask(
    mask_mod: Callable[..., Tensor], tensor: Tensor, problem: Problem
) -> Callable[..., Tensor]:
    plane, kept = _planes(tensor, problem), _expand_columns(tensor, problem)
    place = _places(problem, kept)

    def in_both(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return mask_mod(b, h, i, j) & kept[(plane[b, h], *place(i, j))]

    return in_both


def _places(problem: Problem, tensor: Tensor) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the function from a row and a key to the indices into a tensor with both dimensions.

    The indices are clamped: the mask function is also called for padded rows and keys, and for
    rows and keys of different sequences.
    """
    device, (_, rows, columns) = tensor.device, tensor.shape
    row = torch.arange(padded(rows), device=device).clamp(max=rows - 1)
    if problem.first_key is None:
        column = torch.arange(padded(columns), device=device).clamp(max=columns - 1)

        def place(i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
            return row[i], column[j]

        return place
    first = problem.first_key[row]
    last = torch.full_like(first, columns - 1)

    def place_in_sequence(i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        return row[i], torch.minimum((j - first[i]).clamp(min=0), last[i])

    return place_in_sequence


def _block_mask(
    blocks: Blocks, mask_mod: Callable[..., Tensor], lengths: tuple[int, int]
) -> BlockMask:
    """List the blocks by rows for the forward pass and by keys for the backward pass.

    `BlockMask.from_kv_blocks` would do the latter by vmap, which fails inside dispatch modes.
    """
    kv_num_blocks, kv_indices = _list_blocks(blocks.partial)
    full_kv_num_blocks, full_kv_indices = _list_blocks(blocks.full)
    q_num_blocks, q_indices = _list_blocks(blocks.partial.transpose(-1, -2))
    full_q_num_blocks, full_q_indices = _list_blocks(blocks.full.transpose(-1, -2))
    return BlockMask(
        seq_lengths=lengths,
        kv_num_blocks=kv_num_blocks,
        kv_indices=kv_indices,
        full_kv_num_blocks=full_kv_num_blocks,
        full_kv_indices=full_kv_indices,
        q_num_blocks=q_num_blocks,
        q_indices=q_indices,
        full_q_num_blocks=full_q_num_blocks,
        full_q_indices=full_q_indices,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=mask_mod,
    )


def _list_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks of each block of rows, and their indices, first in order."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()
