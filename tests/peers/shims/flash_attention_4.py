# SPDX-License-Identifier: BSD-3-Clause
"""flash_attn.cute, the interface of FlashAttention 4, with its names and defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import NoCounterpartError, provide, provide_file, public
from .attention import Options, Window, dense, packed, refuse
from .caches import Cache, attend_cache


class JITCache:
    """The cache that tests empty when memory is short."""

    def __init__(self) -> None:
        self.cache: dict[object, object] = {}


def install(files: Path) -> None:
    """Make the modules that tests import; those of FlashAttention 2 must have been made.

    Args:
        files: the folder with FlashAttention's own helper testing.py.
    """
    provide("flash_attn.cute", **public(__name__))
    provide("flash_attn.cute.interface", **public(__name__))
    provide("flash_attn.cute.cache_utils", JITCache=JITCache)
    provide_file("flash_attn.cute.testing", files / "testing.py")


def window_of(window: tuple[Any, Any]) -> Window:
    """Read a window; None means no limit, and negative sizes count."""
    left, right = (None if size is None else int(size) for size in window)
    return left, right


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    **others: object,
) -> tuple[Tensor, Tensor]:
    refuse(q, qv=qv, **others)
    options = Options(
        softmax_scale,
        causal,
        window_of(window_size),
        softcap,
        sink=learnable_sink,
        deterministic=deterministic,
    )
    return dense(q, k, v, options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    scheduler_metadata: object = None,
    return_lse: bool = False,
    qv: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, Tensor]:
    refuse(q, qv=qv, **others)
    options = Options(
        softmax_scale,
        causal,
        window_of(window_size),
        softcap,
        sink=learnable_sink,
        deterministic=deterministic,
    )
    is_dense = cu_seqlens_q is None and cu_seqlens_k is None
    if page_table is not None or (is_dense and seqused_q is None and not q.requires_grad):
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.numel() - 1
        with torch.no_grad():
            return attend_cache(
                q,
                Cache.of(k, v, seqused_k, None, page_table, batch),
                options,
                starts_q=cu_seqlens_q,
                most_q=None if cu_seqlens_q is None else int(cu_seqlens_q.diff().max()),
                as_pages=num_splits != 1,
            )
    if is_dense:
        return dense(q, k, v, options, used_q=seqused_q, used_k=seqused_k)
    shape = q.shape
    q_is_dense, k_is_dense = cu_seqlens_q is None, cu_seqlens_k is None
    starts_q = _starts(q) if cu_seqlens_q is None else cu_seqlens_q
    starts_k = _starts(k) if cu_seqlens_k is None else cu_seqlens_k
    if max_seqlen_q is None or q_is_dense:
        max_seqlen_q = int(starts_q.diff().max())
    if max_seqlen_k is None or k_is_dense:
        max_seqlen_k = int(starts_k.diff().max())
    out, lse = packed(
        q.flatten(0, 1) if q_is_dense else q,
        k.flatten(0, 1) if k_is_dense else k,
        v.flatten(0, 1) if k_is_dense else v,
        starts_q,
        starts_k,
        max_seqlen_q,
        max_seqlen_k,
        options,
        used_q=seqused_q,
        used_k=seqused_k,
    )
    return (out.unflatten(0, shape[:2]) if q_is_dense else out), lse


def _starts(x: Tensor) -> Tensor:
    """Return the row bounds of a dense tensor in packed form."""
    batch, tokens = x.shape[:2]
    return torch.arange(batch + 1, dtype=torch.int32, device=x.device) * tokens


def get_scheduler_metadata(*arguments: object, **named: object) -> None:
    """Return no metadata; `peers.accepted` lists the tests that read it."""


def _flash_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    causal: bool = False,
    return_lse: bool = False,
    tile_mn: object = None,
    **others: object,
) -> tuple[Tensor, Tensor]:
    refuse(q, **others)
    options = Options(causal=causal)
    if page_table is None:
        return dense(q, k, v, options, used_k=seqused_k)
    with torch.no_grad():
        cache = Cache.of(k, v, seqused_k, None, page_table, q.shape[0])
        return attend_cache(q, cache, options, as_pages=True)


def _flash_attn_bwd(*arguments: object, **named: object) -> Any:
    raise NoCounterpartError("a private function of flash_attn.cute")


_flash_attn_bwd_sparse_mla = _flash_attn_bwd
