# SPDX-License-Identifier: BSD-3-Clause
"""Attention in which each query lists its keys; imported by the first such call."""

from .call import listed_attention

__all__ = ["listed_attention"]
