# SPDX-License-Identifier: BSD-3-Clause
"""Gradients by the formula in row chunks: of the bias on all devices, of all tensors on CPUs.

FlexAttention's own gradient of a bias adds each score's share by an atomic operation. For a bias of
K numbers and Q x K scores that is slow and not deterministic. FlexAttention has no gradients on
CPUs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_dmattn.record import Gradients
from flash_dmattn.reference import computing_dtype, per_query_head

from .problem import Problem
from .sinks import shares_or_zero


def gradients(
    problem: Problem,
    scale: float,
    softcap: float,
    sink: Tensor | None,
    dout: Tensor,
    dlse: Tensor,
    wanted: tuple[str, ...],
) -> Gradients:
    """Return the wanted gradients in the computing dtype, in the shapes of the problem's tensors.

    Args:
        problem: keys that no row keeps, and rows that keep no key, must be free of NaN and inf.
        scale, softcap, sink: as in the call.
        dout: ``(B, H, Q, D)``, 0 in rows that keep nothing.
        dlse: ``(B, H, Q)``.
        wanted: any of "query", "key", "value", "bias" and "sink".
    """
    dtype = computing_dtype(problem.query, None)
    heads, kv_heads = problem.heads
    totals: Gradients = {}
    for name in wanted:
        like: Tensor = sink if name == "sink" and sink is not None else getattr(problem, name)
        totals[name] = torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format)

    def grouped(tensor: Tensor) -> Tensor:
        return torch.unflatten(tensor.to(dtype), 1, (kv_heads, heads // kv_heads))

    for rows, keys in problem.parts():
        if keys.start == keys.stop:
            continue
        query, part_dout = grouped(problem.query[:, :, rows]), grouped(dout[:, :, rows])
        key, value = (t[:, :, keys].to(dtype).unsqueeze(2) for t in (problem.key, problem.value))
        scores = scale * (query @ key.transpose(-1, -2)).flatten(1, 2)
        tanh = None
        if softcap > 0:
            tanh = torch.tanh(scores / softcap)
            scores = softcap * tanh
        if problem.bias is not None:
            bias = problem.columns(problem.bias, rows, keys)
            scores = scores + per_query_head(bias, heads, kv_heads)
        dropped = ~problem.kept(rows, keys)
        # All keys of the rows are here. softmax is more accurate than exp(scores - lse), which has
        # the rounding of lse. Softmax of a row of only -inf is NaN.
        scores = scores.masked_fill(dropped, -torch.inf)
        key_probabilities = torch.softmax(scores, -1).masked_fill(dropped, 0)
        probabilities = key_probabilities
        if sink is not None:
            key_share, sink_share = shares_or_zero(sink, torch.logsumexp(scores, -1))
            probabilities = key_probabilities * key_share.unsqueeze(-1)
        if "value" in wanted:
            product = grouped(probabilities).transpose(-1, -2) @ part_dout
            totals["value"][:, :, keys] += product.sum(2)
        if wanted == ("value",):
            continue
        dprobabilities = (part_dout @ value.transpose(-1, -2)).flatten(1, 2)
        dprobabilities = dprobabilities.masked_fill(dropped, 0)
        # Uses the products of dscores, so that rounding errors cancel; dout * out has other errors.
        delta = (probabilities * dprobabilities).sum(-1)
        if "sink" in wanted:
            totals["sink"] -= (sink_share * delta).sum((0, 2))
        dscores = probabilities * (dprobabilities - delta.unsqueeze(-1))
        dscores = (dscores + key_probabilities * dlse[:, :, rows].unsqueeze(-1)).masked_fill(
            dropped, 0
        )
        if "bias" in wanted:
            dbias = problem.columns(totals["bias"], rows, keys)
            dbias += _sum_to_bias(dscores, dbias, heads, kv_heads)
        if tanh is not None:
            dscores = (dscores * (1 - tanh * tanh)).masked_fill(dropped, 0)
        by_group = scale * grouped(dscores)
        if "query" in wanted:
            totals["query"][:, :, rows] += (by_group @ key).flatten(1, 2)
        if "key" in wanted:
            totals["key"][:, :, keys] += (by_group.transpose(-1, -2) @ query).sum(2)
    return totals


def _sum_to_bias(dscores: Tensor, like: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Sum a gradient over the dimensions along which a bias is broadcast."""
    if like.shape[1] == kv_heads != heads:
        dscores = torch.unflatten(dscores, 1, (kv_heads, heads // kv_heads)).sum(2)
    return dscores.sum_to_size(like.shape)
