# SPDX-License-Identifier: BSD-3-Clause
"""Ready layers: dynamic mask attention as a torch.nn.Module, and its cache for decoding."""

from .attention import DynamicMaskAttention
from .cache import AttentionCache

__all__ = ["AttentionCache", "DynamicMaskAttention"]
