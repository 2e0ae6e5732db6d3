# SPDX-License-Identifier: BSD-3-Clause
"""Context parallelism: one sequence on several ranks, which exchange the keys that are kept."""

from .context_parallel import context_parallel_dmattn
from .layer import ContextParallelAttention

__all__ = ["ContextParallelAttention", "context_parallel_dmattn"]
