# SPDX-License-Identifier: BSD-3-Clause
"""The two halves of a kernel pack's forward call, so that each can be timed apart."""

from __future__ import annotations

import torch

from .. import IntervalMask, _core
from ..backends import select_backend
from ..backends.pack import PackBackend, exchanged
from .contestants.ours import FlashDmattn


class PackCall:
    """A forward call on a contestant's tensors and mask, with all buffers made beforehand.

    Raises:
        RuntimeError: no kernel pack serves the tensors' device.
    """

    def __init__(self, contestant: FlashDmattn) -> None:
        query, mask, bias = contestant.query.detach(), contestant.mask, contestant.bias
        backend = select_backend(query.device, "auto")
        if not isinstance(backend, PackBackend):
            raise RuntimeError(f"no kernel pack serves {query.device}, and only packs have plans")
        intervals = mask if isinstance(mask, IntervalMask) else None
        self._pack = backend.pack
        self._tensors = (query, contestant.key.detach(), contestant.value.detach())
        self._masks = {
            "mask": mask if isinstance(mask, torch.Tensor) else None,
            "start": None if intervals is None else intervals.start,
            "end": None if intervals is None else intervals.end,
            "bias": None if bias is None else bias.detach(),
        }
        self._causal = contestant.case.causal
        batch, rows, heads, _ = query.shape
        self._out = torch.empty_like(query)
        self._lse = query.new_empty((batch, heads, rows), dtype=torch.float32)

        def buffer(size: int) -> torch.Tensor | None:
            return query.new_zeros(size, dtype=torch.uint8) if size else None

        problem = self._problem()
        self._plan = buffer(problem.plan_bytes)
        self._workspace = buffer(max(problem.plan_workspace_bytes, problem.forward_workspace_bytes))

    @property
    def has_plan(self) -> bool:
        """Whether there is anything to plan; without a mask there is not."""
        return self._plan is not None

    def plan(self) -> None:
        """Write the plan."""
        self._problem().plan(exchanged(self._plan), exchanged(self._workspace))

    def forward(self) -> torch.Tensor:
        """Run on the plan that was written last."""
        self._problem().forward(
            exchanged(self._out),
            exchanged(self._lse),
            exchanged(self._plan),
            exchanged(self._workspace),
        )
        return self._out

    def _problem(self) -> _core.Problem:
        """Made for each call, since a graph is captured on a stream of its own."""
        query = self._tensors[0]
        stream = 0
        if query.device.type == "cuda":
            stream = int(torch.cuda.current_stream(query.device).cuda_stream)
        return _core.Problem(
            self._pack,
            *(exchanged(tensor) for tensor in self._tensors),
            **{name: exchanged(tensor) for name, tensor in self._masks.items()},
            scale=float(query.shape[-1] ** -0.5),
            causal=self._causal,
            softcap=0.0,
            threads=torch.get_num_threads(),
            stream=stream,
        )
