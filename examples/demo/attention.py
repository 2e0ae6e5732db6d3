# SPDX-License-Identifier: BSD-3-Clause
"""The compared attention layers: with forget gates, and dense."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from benchmarks.dense_attention import DenseAttention
from flash_dmattn import ForgettingAttention

# Made from (width, heads, KV heads). The longest half-life fits a short context: a key is dropped
# after 23 half-lives.
ATTENTIONS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "forgetting": partial(ForgettingAttention, half_lives=(4.0, 64.0)),
    "dense": partial(DenseAttention, window_size=None),
}
