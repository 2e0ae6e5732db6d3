# SPDX-License-Identifier: BSD-3-Clause
"""The forward and the backward pass of a call that has rows and keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from flash_dmattn.record import AttentionInputs, Gradients
from flash_dmattn.reference import per_query_head, without_autocast

from . import gradients, kernel, sinks
from .blocks import Blocks, make_blocks, padded
from .isolation import isolated
from .problem import Problem, make_problem

Result = TypeVar("Result")


def forward(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Return out and lse in the call's layout."""
    return _run(inputs.query.device, lambda: _forward(inputs))


def backward(
    inputs: AttentionInputs,
    dout: Tensor,
    dlse: Tensor,
    out: Tensor,
    lse: Tensor,
    wanted: tuple[str, ...],
) -> Gradients:
    """Return the wanted gradients in the call's layout."""
    return _run(inputs.query.device, lambda: _backward(inputs, dout, dlse, out, lse, wanted))


def _run(device: torch.device, function: Callable[[], Result]) -> Result:
    def compute() -> Result:
        with torch.no_grad(), without_autocast(device.type):
            return function()

    return isolated(compute, device) if kernel.is_fused(device) else compute()


def _forward(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    problem, blocks = _make_problem_and_blocks(inputs)
    call = kernel.make_call(problem, blocks, inputs.scale, inputs.softcap)
    out, lse = kernel.attend(call)
    _, _, rows, head_dim = problem.query.shape
    out, lse = out[:, :, :rows, :head_dim].transpose(1, 2), lse[:, :, :rows]
    if inputs.packed:
        out, lse = out[0], lse[0]
    return out.contiguous(), lse.contiguous()


def _backward(
    inputs: AttentionInputs,
    dout: Tensor,
    dlse: Tensor,
    out: Tensor,
    lse: Tensor,
    wanted: tuple[str, ...],
) -> Gradients:
    problem, blocks = _make_problem_and_blocks(inputs)
    if inputs.packed:
        dout, dlse, out, lse = (t.unsqueeze(0) for t in (dout, dlse, out, lse))
    is_empty = lse == -torch.inf
    # Rows that keep no key may be non-finite, and their gradients are undefined.
    dlse = dlse.masked_fill(is_empty, 0)
    dout = dout.transpose(1, 2).masked_fill(is_empty.unsqueeze(-1), 0)
    problem = problem._replace(query=problem.query.masked_fill(is_empty.unsqueeze(-1), 0))
    is_fused = kernel.is_fused(problem.query.device)
    by_kernel = tuple(name for name in wanted if is_fused and name != "bias")
    by_formula = tuple(name for name in wanted if name not in by_kernel)
    found: Gradients = {}
    if by_formula:
        found = gradients.gradients(
            problem, inputs.scale, inputs.softcap, inputs.sink, dout, dlse, by_formula
        )
    if by_kernel:
        if inputs.sink is not None:
            inner = sinks.without_sink(inputs.sink, dout, dlse, out.transpose(1, 2), lse)
            dout, dlse, found["sink"] = inner
        found |= _kernel_gradients(problem, blocks, inputs, dout, dlse)
    return {name: _to_input_layout(found[name], name, inputs) for name in wanted}


def _make_problem_and_blocks(inputs: AttentionInputs) -> tuple[Problem, Blocks]:
    """Return a problem, with zeros in keys that no row keeps, and its blocks.

    The kernels multiply such keys by probabilities of 0, which gives NaN for non-finite keys. If
    the heads of a group may keep different keys, each head gets its own keys and values.
    """
    problem = make_problem(inputs)
    blocks = make_blocks(problem)
    heads, kv_heads = problem.heads
    kept = blocks.keys
    if kept.shape[1] == heads != kv_heads:
        if _has_lists_of_query_heads(inputs, heads):
            problem = _ungrouped(problem)
        else:
            kept = kept[:, :: heads // kv_heads]
    key, value = (t.masked_fill(~kept.unsqueeze(-1), 0) for t in (problem.key, problem.value))
    return problem._replace(key=key, value=value), blocks


def _has_lists_of_query_heads(inputs: AttentionInputs, heads: int) -> bool:
    per_row = (t.shape[-3] for t in (inputs.mask, inputs.bias) if t is not None)
    per_key = (t.shape[-2] for t in (inputs.start,) if t is not None)
    return heads in (*per_row, *per_key)


def _ungrouped(problem: Problem) -> Problem:
    """Repeat entries per KV head for the query heads of the group."""
    heads, kv_heads = problem.heads
    bias = None if problem.bias is None else per_query_head(problem.bias, heads, kv_heads)
    return problem._replace(
        key=problem.key.repeat_interleave(heads // kv_heads, 1),
        value=problem.value.repeat_interleave(heads // kv_heads, 1),
        rows=tuple(per_query_head(t, heads, kv_heads) for t in problem.rows),
        bias=bias,
    )


def _kernel_gradients(
    problem: Problem, blocks: Blocks, inputs: AttentionInputs, dout: Tensor, dlse: Tensor
) -> Gradients:
    call = kernel.make_call(problem, blocks, inputs.scale, inputs.softcap)
    rows, head_dim = dout.shape[2:]
    padding_rows = padded(rows) - rows
    dout = torch.nn.functional.pad(dout, (0, call.query.shape[3] - head_dim, 0, padding_rows))
    dlse = torch.nn.functional.pad(dlse, (0, padding_rows))
    keys = problem.key.shape[2]
    found = kernel.differentiate(call, dout.contiguous(), dlse.contiguous())
    lengths = {"query": rows, "key": keys, "value": keys}
    return {
        name: gradient[:, :, :length, :head_dim]
        for (name, length), gradient in zip(lengths.items(), found, strict=True)
    }


def _to_input_layout(gradient: Tensor, name: str, inputs: AttentionInputs) -> Tensor:
    like: Tensor = getattr(inputs, name)
    if name == "sink":
        return gradient.to(like.dtype)
    is_bias = name == "bias"
    heads = like.shape[-3] if is_bias else like.shape[-2]
    if gradient.shape[1] != heads:  # the problem was ungrouped
        gradient = torch.unflatten(gradient, 1, (heads, -1)).sum(2)
    if not is_bias:
        gradient = gradient.transpose(1, 2)
    if inputs.packed:
        gradient = gradient[0]
    return gradient.to(like.dtype).contiguous()
