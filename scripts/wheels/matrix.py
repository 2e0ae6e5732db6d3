# SPDX-License-Identifier: BSD-3-Clause
"""What CI builds and tests, from the table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from wheels.targets import Platform, Table

__all__ = ["SMALL_HEAD_DIMS", "Matrix", "plan"]

Matrix: TypeAlias = dict[str, list[dict[str, str]]]
SMALL_ARCH = "sm90"
SMALL_HEAD_DIMS = (64, 128)


def plan(table: Table, machines: Iterable[str] = (), small: bool = False) -> Matrix:
    """Return the jobs: packs, wheels made of them, and tests of the wheels.

    Args:
        table: the declared one.
        machines: only these; all of the table if none is given.
        small: one platform, the newest CUDA, one arch, two head dimensions: what a change is
            tried with.
    """
    chosen = list(machines) or [row.machine for row in table.platforms][: 1 if small else None]
    unknown = sorted(set(chosen) - {row.machine for row in table.platforms})
    if unknown:
        raise ValueError(f"the table has no machine {', '.join(unknown)}")
    platforms = [row for row in table.platforms if row.machine in chosen]
    pythons = [table.pythons[0], table.pythons[-1]] if small else list(table.pythons)
    return {
        "packs": [job for row in platforms for job in _packs(table, row, small)],
        "wheels": [
            {
                "machine": row.machine,
                "runner": row.runner,
                "image": table.wheel.image.format(policy=table.wheel.policy, machine=row.machine),
                "tag": f"{_abi_tag(table)}-{table.wheel.policy}_{row.machine}",
                "artifact": f"wheel-{row.machine}",
            }
            for row in platforms
        ],
        "tests": [
            {
                "machine": row.machine,
                "runner": row.runner,
                "python": python,
                "artifact": f"wheel-{row.machine}",
            }
            for row in platforms
            for python in pythons
        ],
    }


def _packs(table: Table, platform: Platform, small: bool) -> list[dict[str, str]]:
    """Return the jobs that build the packs of one platform, one for each CUDA major."""
    return [
        {
            "cuda": cuda.major,
            "machine": platform.machine,
            "runner": platform.runner,
            "image": cuda.image.format(policy=table.wheel.policy, machine=platform.machine),
            "archs": SMALL_ARCH
            if small
            else " ".join(arch.name for arch in table.archs_of(cuda.toolkit)),
            "head_dims": " ".join(map(str, SMALL_HEAD_DIMS)) if small else "",
            "artifact": f"packs-cu{cuda.major}-{platform.machine}",
        }
        for cuda in (table.cuda[-1:] if small else table.cuda)
    ]


def _abi_tag(table: Table) -> str:
    return f"cp{table.pythons[0].replace('.', '')}-abi3"
