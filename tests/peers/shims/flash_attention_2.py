# SPDX-License-Identifier: BSD-3-Clause
"""flash_attn, the interface of FlashAttention 2, with its names and defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import provide, provide_file, public
from .attention import Options, Window, dense, packed, refuse
from .caches import Cache, Rotary, apply_rotary_emb, attend_cache

USE_TRITON_ROCM = False


def install(files: Path) -> None:
    """Make the modules that tests import.

    Args:
        files: the folder with FlashAttention's own helper bert_padding.py.
    """
    provide("flash_attn", **public(__name__))
    provide("flash_attn.flash_attn_interface", USE_TRITON_ROCM=USE_TRITON_ROCM, **public(__name__))
    provide("flash_attn.layers")
    provide("flash_attn.layers.rotary", apply_rotary_emb=apply_rotary_emb)
    provide_file("flash_attn.bert_padding", files / "bert_padding.py")


def window_of(window: tuple[Any, Any]) -> Window:
    """Read a window; negative sizes mean no limit."""
    left, right = (None if int(size) < 0 else int(size) for size in window)
    return left, right


def _get_block_size_n(*arguments: object, **named: object) -> int:
    """Return the block size for tests of dropout."""
    return 64


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    refuse(q, dropout=dropout_p)
    options = Options(
        softmax_scale,
        causal,
        window_of(window_size),
        softcap,
        alibi_slopes,
        deterministic=deterministic,
    )
    out, lse = dense(q, k, v, options)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *arguments: Any, **named: Any) -> Any:
    return flash_attn_func(q, *kv.unbind(2), *arguments, **named)


def flash_attn_qkvpacked_func(qkv: Tensor, *arguments: Any, **named: Any) -> Any:
    return flash_attn_func(*qkv.unbind(2), *arguments, **named)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    refuse(q, dropout=dropout_p)
    options = Options(
        softmax_scale,
        causal,
        window_of(window_size),
        softcap,
        alibi_slopes,
        deterministic=deterministic,
    )
    with torch.set_grad_enabled(torch.is_grad_enabled() and block_table is None):
        out, lse = packed(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            options,
            block_table=block_table,
        )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *arguments: Any, **named: Any) -> Any:
    return flash_attn_varlen_func(q, *kv.unbind(1), *arguments, **named)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *arguments: Any, **named: Any
) -> Any:
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(*qkv.unbind(1), *lengths, *arguments, **named)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    options = Options(softmax_scale, causal, window_of(window_size), softcap, alibi_slopes)
    cache = Cache.of(k_cache, v_cache, cache_seqlens, cache_batch_idx, block_table, q.shape[0])
    rotary = None
    if rotary_cos is not None and rotary_sin is not None:
        rotary = Rotary(rotary_cos, rotary_sin, rotary_interleaved)
    try:
        out, lse = attend_cache(
            q,
            cache,
            options,
            k=k,
            v=v,
            rotary=rotary,
            left_pad=cache_leftpad,
            as_pages=num_splits != 1,
        )
    except ValueError as error:  # FlashAttention raises RuntimeError
        raise RuntimeError(str(error)) from error
    return (out, lse) if return_softmax_lse else out
