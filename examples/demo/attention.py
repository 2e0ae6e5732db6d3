# SPDX-License-Identifier: BSD-3-Clause
"""The same layer twice: as this package has it, and computed by PyTorch's own attention."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from flash_dmattn import DynamicMaskAttention, IntervalMask, dynamic_mask


class MaskedSdpaAttention(DynamicMaskAttention):
    """The selection and the bias written out as a Q x K mask for scaled_dot_product_attention.

    Key/value heads become batch entries, so that a group of query heads shares one mask: of the
    ways to call it, the one that takes the least memory.
    """

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor,
        attn_mask: torch.Tensor | IntervalMask | None = None,
        *,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> torch.Tensor:
        """As in DynamicMaskAttention, for batches without padding or packing."""
        assert attn_mask is None
        assert cu_seqlens is None
        batch, length, heads, dim = query.shape
        kv_heads = key.shape[2]
        window = length if self.window_size is None else self.window_size
        keep = dynamic_mask(bias, window, is_causal=True)
        assert isinstance(keep, IntervalMask)
        mask = torch.where(keep.to_bool(length), bias, -torch.inf)
        mask = mask.view(batch * kv_heads, 1, length, length)

        def split(heads_last: torch.Tensor) -> torch.Tensor:
            return heads_last.transpose(1, 2).reshape(batch * kv_heads, -1, length, dim)

        group = (-1, heads // kv_heads, -1, -1)
        out = scaled_dot_product_attention(
            split(query), split(key).expand(group), split(value).expand(group), attn_mask=mask
        )
        return out.reshape(batch, heads, length, dim).transpose(1, 2)


ATTENTIONS: dict[str, type[DynamicMaskAttention]] = {
    "flash_dmattn": DynamicMaskAttention,
    "masked SDPA": MaskedSdpaAttention,
}
