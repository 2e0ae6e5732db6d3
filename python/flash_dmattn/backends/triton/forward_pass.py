# SPDX-License-Identifier: BSD-3-Clause
"""The forward pass. The backward pass may run it again for the row sums."""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels.forward import forward_kernel
from .launch import Tiles, blocks, fitting, launch
from .layout import plan_views
from .problem import Problem

# From this magnitude the rounding of lse affects float32 results. 16-bit results are far coarser.
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
    """Write out, lse and out_rest; with ``statistics``, the kernel's row statistics instead."""
    arguments = problem.arguments | plan_views(problem.layout, plan)._asdict()
    arguments |= {"out": out, "lse": lse, "out_rest": out_rest}

    def start(tiles: Tiles) -> None:
        launch(
            forward_kernel,
            problem.sequences * problem.heads * blocks(problem.queries, tiles.block_rows),
            arguments,
            SINK=problem.inputs.sink is not None,
            STATISTICS=statistics,
            HAS_REST=out_rest is not None,
            **tiles.constants,
            **problem.constants,
        )

    fitting("forward", problem.inputs.query, problem.constants["BLOCK_D"], start)


def row_statistics(problem: Problem, plan: Tensor, lse: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the statistics to recompute probabilities: lse, or the largest score and the row sum.

    A large lse has few digits after the point, which limits the precision of gradients. So for
    float32, which only a CPU supports, the sums of such calls are recomputed. There reading lse
    costs no synchronization.
    """
    is_float32_on_cpu = problem.inputs.query.dtype == torch.float32 and lse.device.type == "cpu"
    if not is_float32_on_cpu or not ((lse.abs() >= _COARSE_LSE) & (lse != -torch.inf)).any():
        return lse, None
    row_max, row_sum = torch.full_like(lse, -torch.inf), torch.zeros_like(lse)
    run_forward(problem, plan, row_sum, row_max, statistics=True)
    return row_max, row_sum
