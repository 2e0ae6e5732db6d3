# SPDX-License-Identifier: BSD-3-Clause
"""What can be asked for: a case with those who compete on it and the quantities that are taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from .cases import Case
from .entrants import ENTRANTS, fits
from .quantities import QUANTITIES


@dataclass(frozen=True)
class Workload:
    """One case, who competes on it, and what is measured."""

    shape: Case
    contestants: tuple[str, ...]
    quantities: tuple[str, ...] = tuple(QUANTITIES)

    @property
    def name(self) -> str:
        """The name that the command line and the results know."""
        return self.shape.name


@dataclass(frozen=True)
class WorkloadSet:
    """Workloads by name; those of a quick run, which also leaves slow contestants out."""

    about: str
    workloads: dict[str, Workload]
    quick: tuple[str, ...] = ()


# Left out of a quick run: slow, and part of no bar.
SLOW_CONTESTANTS = tuple(
    name for name in ENTRANTS if name.startswith("sdpa") or ENTRANTS[name].compiled
)


@dataclass(frozen=True)
class Choice:
    """What of a set is wanted; None and empty where the set decides."""

    patterns: Sequence[str] = ()
    contestants: Sequence[str] | None = None
    without: Sequence[str] = ()
    quantities: Sequence[str] | None = None
    quick: bool = False
    decoding_only: bool = False
    shape: dict[str, Any] = field(default_factory=dict)


def chosen_workloads(cases: WorkloadSet, choice: Choice, device: str) -> list[Workload]:
    """The workloads whose names match a pattern, cut down to what is wanted.

    A contestant that is asked for by name also runs on cases where it does not by default, if it
    can. Those that compile come after everything else, so that a run that ends early, or runs out
    of its time, has everything else.

    Raises:
        ValueError: a pattern that no case matches, a shape that cannot be, or nothing is left to
            measure.
    """
    names = _matching(cases, choice)
    left_out = {*choice.without}
    if choice.quick and choice.contestants is None:
        left_out.update(SLOW_CONTESTANTS)
    first: list[Workload] = []
    last: list[Workload] = []
    for workload in map(cases.workloads.__getitem__, names):
        changes = dict(choice.shape)
        if workload.shape.window is None:
            changes.pop("window", None)
        shape = replace(workload.shape, device=device, **changes)
        asked = workload.contestants if choice.contestants is None else choice.contestants
        entered = [name for name in asked if name not in left_out and fits(name, shape)]
        wanted = tuple(
            q for q in workload.quantities if choice.quantities is None or q in choice.quantities
        )
        if not wanted or (choice.decoding_only and shape.queries is None):
            continue
        for compiled, workloads in ((False, first), (True, last)):
            group = tuple(name for name in entered if ENTRANTS[name].compiled is compiled)
            if group:
                workloads.append(Workload(shape, group, wanted))
    if not first and not last:
        what = ", ".join([*(choice.contestants or ()), *(choice.quantities or ())])
        raise ValueError(f"none of {', '.join(names)} measures {what}")
    return first + last


def _matching(cases: WorkloadSet, choice: Choice) -> list[str]:
    if not choice.patterns:
        return list(cases.quick if choice.quick and cases.quick else cases.workloads)
    names: dict[str, None] = {}
    for pattern in choice.patterns:
        found = [name for name in cases.workloads if fnmatchcase(name, pattern)]
        if not found:
            raise ValueError(f"no case matches {pattern!r}; cases are {', '.join(cases.workloads)}")
        names.update(dict.fromkeys(found))
    return list(names)


def plain_cases(workloads: Sequence[Workload]) -> dict[str, dict[str, Any]]:
    """The cases as files of results hold them."""
    cases: dict[str, dict[str, Any]] = {}
    for workload in workloads:
        earlier = cases.get(workload.name, {"contestants": ()})["contestants"]
        cases[workload.name] = {
            **asdict(workload.shape),
            "contestants": [*earlier, *workload.contestants],
            "query_bytes": workload.shape.query_bytes,
        }
    return cases
