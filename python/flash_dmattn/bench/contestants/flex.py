# SPDX-License-Identifier: BSD-3-Clause
"""PyTorch's FlexAttention, compiled, with a block mask made from the same selection."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ... import IntervalMask
from ..cases import Case, Inputs, Pass
from .base import select
from .dense import HeadsFirst


class Flex(HeadsFirst):
    """A block mask from the intervals or the Q x K mask; the bias is added to the scores."""

    block_mask: Any = None

    def __init__(self, case: Case, inputs: Inputs) -> None:
        super().__init__(case, inputs)
        assert self.bias is not None
        bias, group, per_query = self.bias, case.group, case.per_query
        shape = (case.batch, case.kv_heads, case.length)
        # Made once and written anew for each mask: other functions would be compiled again.
        if per_query:
            keep = torch.zeros(bias.shape, dtype=torch.bool, device=bias.device)
            self.buffers = [keep]
        else:
            start = torch.zeros(shape, dtype=torch.int32, device=bias.device)
            end = torch.zeros_like(start)
            self.buffers = [start, end]

        def kept(b: Any, h: Any, row: Any, key: Any) -> Any:
            if per_query:
                return keep[b, h // group, row, key]
            head = h // group
            seen = (start[b, head, key] <= row) & (row < end[b, head, key])
            return seen & (key <= row)

        def with_bias(score: Any, b: Any, h: Any, row: Any, key: Any) -> Any:
            return score + bias[b, h // group, row if per_query else 0, key]

        self.kept, self.with_bias = kept, with_bias

    def arrange_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """In float32, since its gradient is summed in its own dtype."""
        return bias.to(torch.float32, copy=True)

    def prepare(self, which: Pass) -> None:
        """Select, and find the blocks that hold a kept key."""
        case = self.case
        mask = select(case, self.bias)
        parts = [mask.start, mask.end] if isinstance(mask, IntervalMask) else [mask]
        for buffer, part in zip(self.buffers, parts, strict=True):
            assert part is not None
            buffer.copy_(part)
        self.block_mask = _compiled_flex().create_block_mask(
            self.kept, case.batch, case.heads, case.length, case.length, device=self.query.device
        )

    def attend(self) -> torch.Tensor:
        out: torch.Tensor = _compiled_flex().attention(
            self.query,
            self.key,
            self.value,
            score_mod=self.with_bias,
            block_mask=self.block_mask,
            enable_gqa=True,
        )
        return out


@dataclass(frozen=True)
class _CompiledFlex:
    attention: Callable[..., Any]
    create_block_mask: Callable[..., Any]


@functools.cache
def _compiled_flex() -> _CompiledFlex:
    """Compile once in a process; what is compiled for a shape serves all calls of that shape."""
    import torch._functorch.config as functorch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Otherwise a compiled backward frees what running it again, to time it alone, needs.
    functorch.donated_buffer = False
    return _CompiledFlex(torch.compile(flex_attention), torch.compile(create_block_mask))
