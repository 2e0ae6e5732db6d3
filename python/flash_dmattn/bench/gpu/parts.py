# SPDX-License-Identifier: BSD-3-Clause
"""The two halves of a kernel pack's forward call, so that each can be timed apart."""

from __future__ import annotations

import torch

from ... import IntervalMask
from ...backends import AttentionInputs, select_backend
from ...backends.base import lse_dtype, lse_shape
from ...backends.pack import PackBackend, exchanged
from ..contestants import FlashDmattn


class PackCall:
    """A forward call on a contestant's tensors and mask, with all buffers made beforehand.

    Raises:
        RuntimeError: no kernel pack serves the tensors' device.
    """

    def __init__(self, contestant: FlashDmattn) -> None:
        query, mask, bias = contestant.query.detach(), contestant.mask, contestant.bias
        intervals = mask if isinstance(mask, IntervalMask) else None
        self.inputs = AttentionInputs(
            query=query,
            key=contestant.key.detach(),
            value=contestant.value.detach(),
            mask=None if isinstance(mask, IntervalMask) else mask,
            start=None if intervals is None else intervals.start,
            end=None if intervals is None else intervals.end,
            bias=None if bias is None else bias.detach(),
            cu_seqlens_q=None,
            cu_seqlens_k=None,
            block_table=None,
            max_seqlen_q=0,
            max_seqlen_k=0,
            scale=float(query.shape[-1] ** -0.5),
            causal=contestant.case.causal,
            softcap=0.0,
            deterministic=False,
        )
        backend = select_backend(query.device, "auto")
        if not isinstance(backend, PackBackend):
            raise RuntimeError(f"no kernel pack serves {query.device}, and only packs have plans")
        self._backend = backend
        problem = backend._problem(self.inputs)
        self.out = torch.empty_like(query)
        self.lse = query.new_empty(lse_shape(query), dtype=lse_dtype(query.dtype))
        self.has_plan = backend.plan_bytes(self.inputs) > 0

        def buffer(size: int) -> torch.Tensor | None:
            return query.new_zeros(size, dtype=torch.uint8) if size else None

        self._plan = buffer(backend.plan_bytes(self.inputs))
        self._workspace = buffer(max(problem.plan_workspace_bytes, problem.forward_workspace_bytes))

    def plan(self) -> None:
        """Write the plan."""
        problem = self._backend._problem(self.inputs)
        problem.plan(exchanged(self._plan), exchanged(self._workspace))

    def forward(self) -> torch.Tensor:
        """Run on the plan that was written last."""
        problem = self._backend._problem(self.inputs)
        problem.forward(
            exchanged(self.out),
            exchanged(self.lse),
            exchanged(self._plan),
            exchanged(self._workspace),
        )
        return self.out
