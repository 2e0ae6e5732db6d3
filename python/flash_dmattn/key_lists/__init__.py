# SPDX-License-Identifier: BSD-3-Clause
"""Attention of which each query lists its keys; imported by the first call that does."""

from .call import listed_attention

__all__ = ["listed_attention"]
