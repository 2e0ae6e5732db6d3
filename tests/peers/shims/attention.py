# SPDX-License-Identifier: BSD-3-Clause
"""Attention with the options that FlashAttention's versions 2, 3 and 4 share.

Where the two libraries differ, this module translates: FlashAttention's lse counts the attention
sink and flash_dmattn's does not, so the sink is added to it; its windows, chunks, left padding and
used lengths become intervals of queries for each key; a bias by ALiBi becomes a bias tensor.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from flash_dmattn import IntervalMask, flash_dmattn_func, flash_dmattn_varlen_func

from . import NoCounterpartError

Window = tuple["int | None", "int | None"]
MOST_HEAD_DIM = 256


@dataclasses.dataclass(frozen=True)
class Options:
    """The common options of the calls. A window's None and a chunk of 0 mean no limit."""

    scale: float | None = None
    causal: bool = False
    window: Window = (None, None)
    softcap: float = 0.0
    alibi: Tensor | None = None
    sink: Tensor | None = None
    deterministic: bool = False
    chunk: int = 0

    @property
    def limits_keys(self) -> bool:
        return self.window != (None, None) or self.chunk > 0

    @property
    def looks_back_only(self) -> bool:
        return self.causal or self.window[1] == 0

    def arguments(self, q: Tensor, *, aligned: bool) -> dict[str, Any]:
        """Return the arguments that both functions of flash_dmattn take.

        Args:
            q: the queries.
            aligned: all queries and keys of the tensors count, so is_causal is valid.
        """
        sink = self.sink
        if sink is not None and sink.dtype not in (q.dtype, torch.float32):
            sink = sink.float()
        return {
            "softmax_scale": q.shape[-1] ** -0.5 if self.scale is None else self.scale,
            "is_causal": self.causal and aligned,
            "softcap": max(float(self.softcap), 0.0),
            "deterministic": True if self.deterministic else None,
            "return_lse": True,
            "sink": sink,
        }


def refuse(q: Tensor, *, dropout: float = 0.0, qv: Tensor | None = None, **others: object) -> None:
    """Raise for options without a counterpart.

    Args:
        q: the queries, which may have 8 bits.
        dropout: its probability.
        qv: FlashAttention 3's second queries.
        others: arguments that must be None.
    """
    if dropout:
        raise NoCounterpartError("dropout")
    if qv is not None:
        raise NoCounterpartError("qv")
    given = sorted(name for name, value in others.items() if value is not None)
    if q.dtype == torch.float8_e4m3fn or any(name.endswith("descale") for name in given):
        raise NoCounterpartError("fp8")
    if given:
        raise NoCounterpartError(f"arguments {given}")


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    *,
    used_q: Tensor | None = None,
    used_k: Tensor | None = None,
    left_pad: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of a batch.

    Args:
        q: (batch, queries, heads, head_dim).
        k: (batch, keys, kv_heads, head_dim).
        v: (batch, keys, kv_heads, value_dim).
        options: of the call.
        used_q: (batch,), how many queries count.
        used_k: (batch,), how many keys count.
        left_pad: (batch,), how many of them are skipped.
    """
    batch, queries = q.shape[:2]
    keys, device = k.shape[1], q.device
    aligned = used_q is None and used_k is None and left_pad is None
    arguments = options.arguments(q, aligned=aligned)
    refuse_wide_heads(q, v)
    j = torch.arange(keys, device=device)
    lengths_q = _lengths(used_q, batch, queries, device)
    lengths_k = _lengths(used_k, batch, keys, device)
    mask = bias = None
    if not aligned or options.limits_keys:
        rows = 1 if aligned else batch
        skipped = None if left_pad is None else left_pad.long()[:, None]
        start, end = intervals(
            j[None], lengths_q[:rows, None], lengths_k[:rows, None], options, skipped
        )
        mask = IntervalMask(start[:, None].contiguous(), end[:, None].contiguous())
    if options.alibi is not None:
        slopes = options.alibi.float().reshape(-1, q.shape[2])[:, :, None, None]
        if options.looks_back_only:
            bias = slopes * (j - (lengths_k[:, None] - 1))[:, None, None].float()
        else:
            i = torch.arange(queries, device=device)[:, None]
            distance = i + (lengths_k - lengths_q)[:, None, None] - j
            bias = -slopes * distance.abs()[:, None].float()
    out, lse = flash_dmattn_func(q, k, v, mask, bias, **arguments)
    return out, lse_with_sink(lse, options.sink, head_dim=1)


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    most_q: int,
    most_k: int,
    options: Options,
    *,
    used_q: Tensor | None = None,
    used_k: Tensor | None = None,
    left_pad: Tensor | None = None,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of packed sequences, whose keys may lie in pages.

    Args:
        q: (total_q, heads, head_dim).
        k: (total_k, kv_heads, head_dim), or (pages, page_size, kv_heads, head_dim).
        v: likewise.
        starts_q: (sequences + 1,), where each sequence's queries start.
        starts_k: likewise for keys.
        most_q: of one sequence.
        most_k: likewise.
        options: of the call.
        used_q: (sequences,), how many queries count.
        used_k: (sequences,), how many keys count.
        left_pad: (sequences,), how many of them are skipped.
        block_table: (sequences, pages of one).
    """
    device = q.device
    aligned = used_q is None and used_k is None and left_pad is None
    arguments = options.arguments(q, aligned=aligned)
    refuse_wide_heads(q, v)
    lengths_q = starts_q.long().diff() if used_q is None else used_q.long()
    lengths_k = starts_k.long().diff() if used_k is None else used_k.long()
    of_key, j = places(starts_k)
    mask = bias = None
    if not aligned or options.limits_keys:
        skipped = None if left_pad is None else left_pad.long()[of_key]
        start, end = intervals(j, lengths_q[of_key], lengths_k[of_key], options, skipped)
        mask = IntervalMask(start[None].contiguous(), end[None].contiguous())
    if options.alibi is not None:
        slopes = options.alibi.float().expand(lengths_k.numel(), -1)
        if options.looks_back_only:
            distance = (j - (lengths_k[of_key] - 1)).float()
            bias = (slopes[of_key] * distance[:, None]).t()[:, None].contiguous()
        else:
            of_query, i = places(starts_q)
            last = i + (lengths_k - lengths_q)[of_query]
            distance = (last[:, None] - torch.arange(int(most_k), device=device)).abs().float()
            bias = -slopes[of_query].t()[:, :, None] * distance
    if block_table is not None:
        arguments["block_table"] = block_table
    out, lse = flash_dmattn_varlen_func(
        q,
        k,
        v,
        starts_q,
        starts_k,
        int(most_q),
        int(most_k),
        attn_mask=mask,
        attn_bias=bias,
        **arguments,
    )
    return out, lse_with_sink(lse, options.sink, head_dim=0)


def intervals(
    j: Tensor,
    lengths_q: Tensor,
    lengths_k: Tensor,
    options: Options,
    left_pad: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the first query that sees each key, and one past the last.

    Args:
        j: where the keys are in their sequences; the others must broadcast with it.
        lengths_q: of the sequences.
        lengths_k: likewise.
        options: whose window, chunk and causality count.
        left_pad: how many keys are skipped.
    """
    shift = lengths_k - lengths_q  # from a query's place to its key's
    left, right = options.window
    if options.causal:
        right = 0
    start = torch.zeros_like(j + shift)
    end = start + lengths_q
    if right is not None:
        start = torch.maximum(start, j - shift - right)
    if left is not None:
        end = torch.minimum(end, j - shift + left + 1)
    if options.chunk:
        skipped = 0 if left_pad is None else left_pad
        chunks = torch.div(j - skipped, options.chunk, rounding_mode="floor")
        first = chunks * options.chunk + skipped
        start = torch.maximum(start, first - shift)
        end = torch.minimum(end, first + options.chunk - shift)
    dropped = j >= lengths_k
    if left_pad is not None:
        dropped = dropped | (j < left_pad)
    end = torch.where(dropped, torch.zeros_like(end), end).clamp(min=0)
    start = torch.minimum(start.clamp(min=0), end)
    return start.to(torch.int32), end.to(torch.int32)


def refuse_wide_heads(q: Tensor, v: Tensor) -> None:
    """Raise for heads that are wider than all kernels."""
    most = max(q.shape[-1], v.shape[-1])
    if most > MOST_HEAD_DIM:
        raise NoCounterpartError(f"head dimension {most}")


def lse_with_sink(lse: Tensor, sink: Tensor | None, head_dim: int) -> Tensor:
    """Count the sink in the lse, as FlashAttention does.

    Args:
        lse: without it.
        sink: (heads,), or None.
        head_dim: which dimension of lse the heads are.
    """
    if sink is None:
        return lse
    shape = [-1 if dim == head_dim else 1 for dim in range(lse.dim())]
    logits = sink.float().reshape(shape).expand_as(lse)
    empty = lse == -torch.inf  # logaddexp has no gradient there
    total = torch.logaddexp(torch.where(empty, torch.zeros_like(lse), lse), logits)
    return torch.where(empty, logits, total)


def _lengths(used: Tensor | None, batch: int, length: int, device: torch.device) -> Tensor:
    return torch.full((batch,), length, device=device) if used is None else used.long()


def places(starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sequence of each packed token, and its place there.

    Args:
        starts: (sequences + 1,), where each sequence starts.
    """
    lengths = starts.long().diff()
    numbers = torch.arange(lengths.numel(), device=starts.device)
    sequence = torch.repeat_interleave(numbers, lengths)
    place = torch.arange(sequence.numel(), device=starts.device) - starts.long()[sequence]
    return sequence, place
