# SPDX-License-Identifier: BSD-3-Clause
"""Portable GPU kernels in Triton, for GPUs without a kernel pack.

Importing this package does not import triton; importing its backend does.
"""

from .availability import LOWEST_VERSION, why_unavailable

__all__ = ["LOWEST_VERSION", "why_unavailable"]
