# SPDX-License-Identifier: BSD-3-Clause
"""The forward pass, which the backward pass may run again for the sums of its rows."""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels.forward import forward_kernel
from .launch import Tiles, blocks, fitting, launch
from .layout import plan_views
from .problem import Problem

# From here on the rounding of lse shows in float32. 16-bit results are far coarser.
_COARSE_LSE = 16.0


def run_forward(
    problem: Problem,
    plan: Tensor,
    out: Tensor,
    lse: Tensor,
    out_rest: Tensor | None = None,
    *,
    statistics: bool = False,
) -> None:
    """Write out, lse and out_rest, or what stands for them with ``statistics``: see the kernel."""
    arguments = problem.arguments | plan_views(problem.layout, plan)._asdict()
    arguments |= {"out": out, "lse": lse, "out_rest": out_rest}

    def start(tiles: Tiles) -> None:
        launch(
            forward_kernel,
            problem.sequences * problem.heads * blocks(problem.queries, tiles.block_rows),
            arguments,
            SINK=problem.inputs.sink is not None,
            STATISTICS=statistics,
            REST=out_rest is not None,
            **tiles.constants,
            **problem.constants,
        )

    fitting("forward", problem.inputs.query, problem.constants["BLOCK_D"], start)


def row_statistics(problem: Problem, plan: Tensor, lse: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return what the probabilities are computed from again: lse, or the largest score and a sum.

    Large scores leave an lse few digits behind the point, and the gradients no more than these. In
    float32, so only on a CPU, where to look at lse costs nothing, the sums are then made anew.
    """
    exact = problem.inputs.query.dtype == torch.float32 and lse.device.type == "cpu"
    if not exact or not ((lse.abs() >= _COARSE_LSE) & (lse != -torch.inf)).any():
        return lse, None
    top, sums = torch.full_like(lse, -torch.inf), torch.zeros_like(lse)
    run_forward(problem, plan, sums, top, statistics=True)
    return top, sums
