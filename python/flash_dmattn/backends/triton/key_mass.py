# SPDX-License-Identifier: BSD-3-Clause
"""The attention that each key received, by a second query-key product."""

from __future__ import annotations

import torch
from torch import Tensor

from .forward_pass import row_statistics
from .kernels.key_mass import key_mass_kernel
from .launch import Tiles, blocks, fitting, launch, row_parts, tiles_of
from .layout import plan_views
from .make_plan import ordered_keys
from .problem import Problem


def key_mass(problem: Problem, plan: Tensor, lse: Tensor) -> Tensor:
    """Return the sum of each key's probabilities: ``(B, H, K)``, or ``(H, total_k)``."""
    inputs = problem.inputs
    widest = tiles_of("mass", problem.constants["BLOCK_D"] * inputs.query.itemsize)[0].block_keys
    block_programs = problem.sequences * problem.heads * blocks(problem.keys, widest)
    parts = row_parts(block_programs, lse.device)
    front = () if inputs.packed else (problem.batches,)
    shape = (parts, *front, problem.heads, problem.total_keys)
    # Keys that no row keeps are skipped: their sums stay 0.
    mass = torch.zeros(shape, dtype=torch.float32, device=lse.device)
    if problem.rows == 0:
        return mass[0]
    views = plan_views(problem.layout, plan)
    statistics, row_sums = row_statistics(problem, plan, lse.contiguous())
    arguments = problem.arguments | views._asdict()
    arguments |= {"lse": statistics, "row_sums": row_sums, "mass": mass, "row_parts": parts}
    arguments["ordered"] = ordered_keys(problem, views)
    constants = {n: v for n, v in problem.constants.items() if n not in ("PAGED", "GUARD")}

    def start(tiles: Tiles) -> None:
        launch(
            key_mass_kernel,
            problem.sequences * problem.heads * parts * blocks(problem.keys, tiles.block_keys),
            arguments,
            SINK=inputs.sink is not None,
            SUMS=row_sums is not None,
            **constants,
            **tiles.constants,
        )

    fitting("mass", inputs.query, problem.constants["BLOCK_D"], start)
    return mass[0] if parts == 1 else mass.sum(0)
