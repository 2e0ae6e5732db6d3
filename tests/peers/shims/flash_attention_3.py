# SPDX-License-Identifier: BSD-3-Clause
"""flash_attn_interface, the interface of FlashAttention 3, with its names and defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from . import NoCounterpartError, provide, provide_file, public
from .attention import Options, dense, packed, refuse
from .caches import Cache, Rotary, attend_cache
from .flash_attention_2 import window_of


def install(files: Path) -> None:
    """Make the modules that tests import.

    Args:
        files: the folder with FlashAttention's own helpers padding.py and test_util.py.
    """
    provide("flash_attn_interface", **public(__name__))
    provide_file("padding", files / "padding.py")
    provide_file("test_util", files / "test_util.py")


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    refuse(q, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    options = Options(
        softmax_scale,
        causal,
        window_of(window_size),
        softcap,
        deterministic=deterministic,
        chunk=attention_chunk,
    )
    out, lse = dense(q, k, v, options)
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    refuse(q, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    options = Options(
        softmax_scale,
        causal,
        window_of(window_size),
        softcap,
        deterministic=deterministic,
        chunk=attention_chunk,
    )
    out, lse = packed(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        options,
        used_q=seqused_q,
        used_k=seqused_k,
    )
    return (out, lse) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    refuse(q, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    options = Options(softmax_scale, causal, window_of(window_size), softcap, chunk=attention_chunk)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.numel() - 1
    cache = Cache.of(k_cache, v_cache, cache_seqlens, cache_batch_idx, page_table, batch)
    rotary = None
    if rotary_cos is not None and rotary_sin is not None:
        rotary = Rotary(rotary_cos, rotary_sin, rotary_interleaved)
    out, lse = attend_cache(
        q,
        cache,
        options,
        k=k,
        v=v,
        starts_new=cu_seqlens_k_new,
        rotary=rotary,
        rotary_first=rotary_seqlens,
        left_pad=cache_leftpad,
        starts_q=cu_seqlens_q,
        most_q=max_seqlen_q,
        as_pages=num_splits != 1,
    )
    return (out, lse) if return_softmax_lse else out


def flash_attn_combine(*arguments: object, **named: object) -> Any:
    raise NoCounterpartError("flash_attn_combine")


def get_scheduler_metadata(*arguments: object, **named: object) -> None:
    """Return no metadata: no call needs any."""
