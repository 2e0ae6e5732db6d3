# SPDX-License-Identifier: BSD-3-Clause
"""The same dynamic mask attention twice: with this package, and with PyTorch's own attention.

Both take query (B,N,H,D), key and value (B,N,Hk,D) and bias (B,Hk,1,N), keep for each query the
``window`` visible keys with the largest bias, and return (B,N,H,D).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from flash_dmattn import dynamic_mask, flash_dmattn_func

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]


def flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, window: int
) -> torch.Tensor:
    """flash_dmattn: time and memory follow the kept keys."""
    return flash_dmattn_func(query, key, value, attn_bias=bias, window_size=window, is_causal=True)


def masked_sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, window: int
) -> torch.Tensor:
    """PyTorch's attention with the selection and the bias written out as a Q x K mask.

    Key/value heads become batch entries, so that a group of query heads shares one mask: of the
    ways to call it, the one that takes the least memory.
    """
    batch, length, heads, dim = query.shape
    kv_heads = key.shape[2]
    keep = dynamic_mask(bias.detach(), window, is_causal=True).to_bool(length)
    mask = torch.where(keep, bias, -torch.inf).view(batch * kv_heads, 1, length, length)

    def split(heads_last: torch.Tensor) -> torch.Tensor:
        return heads_last.transpose(1, 2).reshape(batch * kv_heads, -1, length, dim)

    group = (-1, heads // kv_heads, -1, -1)
    out = scaled_dot_product_attention(
        split(query), split(key).expand(group), split(value).expand(group), attn_mask=mask
    )
    return out.reshape(batch, heads, length, dim).transpose(1, 2)


ATTENTIONS: dict[str, Attention] = {"flash_dmattn": flash_attention, "masked SDPA": masked_sdpa}
