# SPDX-License-Identifier: BSD-3-Clause
"""Where flash-dmattn 1.2.2 had its functions."""

from __future__ import annotations

from .interface import flash_dmattn_func, flash_dmattn_varlen_func

__all__ = ["flash_dmattn_func", "flash_dmattn_varlen_func"]
