# SPDX-License-Identifier: BSD-3-Clause
"""The baseline layer for models with dynamic masks and with forget gates."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flash_dmattn import DynamicMaskAttention


class DenseAttention(DynamicMaskAttention):
    """DynamicMaskAttention without biases and masks, computed by PyTorch."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        del self.A, self.dt_proj

    def key_bias(self, value: Tensor) -> Tensor:
        """Return a tensor that `attend` does not read."""
        return value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Attend to all keys up to the query's own."""
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)
