# SPDX-License-Identifier: BSD-3-Clause
"""What can be asked for: a case with those who compete on it and the quantities that are taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from .cases import Case
from .contestants.entrants import ENTRANTS, fits

# Times in seconds, on the device except for "host"; memory in bytes.
QUANTITIES = {
    "selection": "making the mask from the bias",
    "plan": "the plan alone",
    "forward": "forward, plan included",
    "forward_planned": "forward with a plan made before",
    "forward_with_mask": "making the mask, and forward",
    "backward": "backward, with the bias's gradient where there is a bias",
    "forward_backward": "forward and backward",
    "end_to_end": "making the mask, forward and backward",
    "host": "host time of a forward call without gradients",
    "memory_forward": "peak extra memory of forward",
    "memory_forward_backward": "peak extra memory of forward and backward",
    "memory_with_mask": "the same with making the mask",
}
DECODE_QUANTITIES = ("selection", "plan", "forward", "forward_planned", "forward_with_mask")


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
    quick: tuple[str, ...]


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
    shape: tuple[tuple[str, Any], ...] = ()


def chosen_workloads(cases: WorkloadSet, choice: Choice, device: str) -> list[Workload]:
    """The workloads whose names match a pattern, cut down to what is wanted.

    A contestant that is asked for by name also runs on cases where it does not by default, if it
    can.

    Raises:
        ValueError: a pattern that no case matches, a shape that cannot be, or nothing is left to
            measure.
    """
    names = _matching(cases, choice)
    left_out = set(choice.without)
    if choice.quick and choice.contestants is None:
        left_out.update(SLOW_CONTESTANTS)
    chosen = []
    for name in names:
        workload = cases.workloads[name]
        changes = dict(choice.shape)
        if workload.shape.window is None:
            changes.pop("window", None)
        shape = replace(workload.shape, device=device, **changes)
        asked = workload.contestants if choice.contestants is None else choice.contestants
        entered = tuple(c for c in asked if c not in left_out and fits(c, shape))
        wanted = tuple(
            q for q in workload.quantities if choice.quantities is None or q in choice.quantities
        )
        if wanted and entered and (shape.queries is not None or not choice.decoding_only):
            chosen.append(Workload(shape, entered, wanted))
    if not chosen:
        what = ", ".join([*(choice.contestants or ()), *(choice.quantities or ())])
        raise ValueError(f"none of {', '.join(names)} measures {what}")
    return _compiled_last(chosen)


def _matching(cases: WorkloadSet, choice: Choice) -> list[str]:
    if not choice.patterns:
        return list(cases.quick if choice.quick else cases.workloads)
    names: dict[str, None] = {}
    for pattern in choice.patterns:
        found = [name for name in cases.workloads if fnmatchcase(name, pattern)]
        if not found:
            raise ValueError(f"no case matches {pattern!r}; cases are {', '.join(cases.workloads)}")
        names.update(dict.fromkeys(found))
    return list(names)


def _compiled_last(workloads: Sequence[Workload]) -> list[Workload]:
    """The workloads, and after all of them once more those with contestants that compile.

    So a run that ends early, or runs out of its time, has everything else.
    """
    first, last = [], []
    for workload in workloads:
        quick = tuple(c for c in workload.contestants if not ENTRANTS[c].compiled)
        slow = tuple(c for c in workload.contestants if ENTRANTS[c].compiled)
        first += [replace(workload, contestants=quick)] if quick else []
        last += [replace(workload, contestants=slow)] if slow else []
    return first + last
