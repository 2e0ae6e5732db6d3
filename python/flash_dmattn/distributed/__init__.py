# SPDX-License-Identifier: BSD-3-Clause
"""Context parallelism: one sequence on several ranks, which exchange the kept keys."""

from .context_parallel import context_parallel_dmattn
from .forgetting import ContextParallelForgetting, context_parallel_forgetting
from .layer import ContextParallelAttention

__all__ = [
    "ContextParallelAttention",
    "ContextParallelForgetting",
    "context_parallel_dmattn",
    "context_parallel_forgetting",
]
