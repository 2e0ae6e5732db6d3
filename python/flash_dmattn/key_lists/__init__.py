# SPDX-License-Identifier: BSD-3-Clause
"""Attention in which each query lists its keys. The first such call imports this package."""

from .call import listed_attention

__all__ = ["listed_attention"]
