# SPDX-License-Identifier: BSD-3-Clause
"""Ready layers: attention as a torch.nn.Module, and their caches for decoding."""

from .attention import DynamicMaskAttention
from .cache import AttentionCache
from .forgetting import ForgettingAttention
from .forgetting_cache import ForgettingCache

__all__ = ["AttentionCache", "DynamicMaskAttention", "ForgettingAttention", "ForgettingCache"]
