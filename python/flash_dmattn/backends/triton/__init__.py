# SPDX-License-Identifier: BSD-3-Clause
"""Portable GPU kernels in Triton, for GPUs that no kernel pack was built for.

Importing this package does not import triton; its backend does.
"""

from .availability import LOWEST_VERSION, why_unavailable

__all__ = ["LOWEST_VERSION", "why_unavailable"]
