# SPDX-License-Identifier: BSD-3-Clause
"""Forgetting attention with the arguments of flash-linear-attention's function."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_dmattn import checks
from flash_dmattn.arguments import check_together
from flash_dmattn.forgetting import forgetting_attention, forgetting_bias
from flash_dmattn.forgetting_formula import bias_for_backend
from flash_dmattn.interface import flash_dmattn_func, flash_dmattn_varlen_func
from flash_dmattn.masks import IntervalMask, mark_runs
from flash_dmattn.modules.rotary import packed_positions

from .structural_biology import backend_of

__all__ = ["parallel_forgetting_attn"]


def parallel_forgetting_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    window_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    head_first: bool = False,
    prune: float | None = None,
) -> Tensor:
    """Compute ``parallel_forgetting_attn`` of flash-linear-attention, also on CPUs.

    Attention is causal. The score of a key gets the sum of the gates between query and key. float32
    tensors on a GPU are computed by ``backend="triton"``, in products of float32 without TF32.

    Args:
        q: ``(B, N, H, D)``.
        k, v: ``(B, N, Hk, D)``; H is a multiple of Hk.
        g: ``(B, N, H)``, or also ``(B, N, Hk)``: logarithms of forget gates, at most 0.
        scale: of the scores; ``D ** -0.5`` by default.
        window_size: most keys that a query sees, the last ones; None for all. Before version 0.6
            this position was that of cu_seqlens.
        cu_seqlens: integers ``(sequences + 1,)``: 0, then where each packed sequence ends. B is
            then 1. The longest length is read from the device, which synchronizes.
        head_first: of versions before 0.6; must be False.
        prune: drop keys that have decayed below this, as in `forgetting_bias`, which saves most of
            the time of a long sequence. The original function has no pruning.

    Returns:
        ``(B, N, H, D)``, differentiable with respect to q, k, v and g.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `flash_dmattn_func`.
    """
    if checks.flag("head_first", head_first):
        raise ValueError(
            "head_first must be False: q, k and v are (B, N, heads, D) and g is (B, N, heads); "
            "transpose(1, 2) makes them so"
        )
    for name, tensor in (("q", q), ("k", k), ("v", v), ("g", g)):
        checks.tensor(name, tensor)
        wanted = 3 if name == "g" else 4
        if tensor.dim() != wanted:
            form = "(B, N, heads)" if name == "g" else "(B, N, heads, D)"
            raise ValueError(f"{name} must have shape {form}, got {tuple(tensor.shape)}")
    check_together("q", q, {"k": k, "v": v, "g": g, "cu_seqlens": cu_seqlens})
    batch, length, heads, _ = q.shape
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape[:2] != q.shape[:2]:
            raise ValueError(
                f"{name} must have shape (B, N, Hk, D) with (B, N) = {(batch, length)}, as q, got "
                f"{tuple(tensor.shape)}"
            )
    if tuple(g.shape[:2]) != (batch, length) or not checks.is_one_of(g.shape[2], heads, k.shape[2]):
        raise ValueError(
            f"g must have shape (B, N, {{H|Hk}}) = ({batch}, {length}, {{{heads}|{k.shape[2]}}}), "
            f"to go with q and k, got {tuple(g.shape)}"
        )
    if window_size is not None:
        window_size = checks.index("window_size", window_size, 1, checks.MAX_ROWS)
    backend = backend_of(q)
    if cu_seqlens is None:
        gates = g.transpose(1, 2)
        if window_size is None:
            return forgetting_attention(q, k, v, gates, prune, softmax_scale=scale, backend=backend)
        bias, mask = forgetting_bias(gates, prune)
        mask = _within(window_size, mask, torch.arange(length, device=q.device)[None])
        bias = bias_for_backend(backend, bias)
        out = flash_dmattn_func(q, k, v, mask, bias, scale, is_causal=True, backend=backend)
        assert isinstance(out, Tensor)
        return out
    if batch != 1:
        raise ValueError(f"q must have a batch of 1 with cu_seqlens, got {tuple(q.shape)}")
    if cu_seqlens.dtype == torch.int64:
        cu_seqlens = cu_seqlens.to(torch.int32)
    bias, mask = forgetting_bias(g[0].transpose(0, 1), prune, cu_seqlens)
    if window_size is not None:
        mask = _within(window_size, mask, packed_positions(cu_seqlens, length))
    most = checks.read_max_seqlen("cu_seqlens", cu_seqlens)
    out = flash_dmattn_varlen_func(
        q[0], k[0], v[0], cu_seqlens, cu_seqlens, most, most, scale,
        attn_mask=mask, attn_bias=bias_for_backend(backend, bias), is_causal=True, backend=backend,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out.unsqueeze(0)


def _within(window_size: int, mask: IntervalMask | None, row: Tensor) -> IntervalMask:
    """Return a mask that also drops keys before the window of a query.

    Args:
        window_size: number of keys that a query sees.
        mask: or None for all keys.
        row: ``(1, N)``, packed ``(total,)``: each key's row.
    """
    start = row.to(torch.int32).unsqueeze(0)
    end = (start.long() + window_size).clamp(max=checks.MAX_ROWS).int()
    window = mark_runs(IntervalMask(start, end))
    return window if mask is None else window & mask
