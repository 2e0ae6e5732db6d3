# SPDX-License-Identifier: BSD-3-Clause
"""The functions of flash-dmattn 1.2.2 at their import path."""

from __future__ import annotations

from .interface import flash_dmattn_func, flash_dmattn_varlen_func

__all__ = ["flash_dmattn_func", "flash_dmattn_varlen_func"]
