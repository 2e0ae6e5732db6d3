# SPDX-License-Identifier: BSD-3-Clause
"""What the loader decided for one device, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TypeAlias

from .candidates import Candidate
from .facts import Situation

__all__ = ["Accepted", "Entry", "Rank", "Refused", "Rule", "Trace", "Verdict"]


class Rule(IntEnum):
    """What refused a candidate, in the order of checking: the later, the nearer to working."""

    DEVICE_KIND = 1
    UNREADABLE = 2
    CAPABILITY = 3
    MACHINE = 4
    DRIVER = 5
    ABI_VERSION = 6
    VERSION = 7
    UNTRIED = 8
    FORCED = 9
    DEFECT = 10
    OPENING = 11


_DAMAGE = (Rule.DEFECT, Rule.OPENING)


@dataclass(frozen=True)
class Accepted:
    """The candidate can serve the device. ``note`` is what a reader should know of it, or ""."""

    note: str = ""


@dataclass(frozen=True)
class Refused:
    """The candidate cannot serve the device: the rule, the reason, and the command or step that
    changes it.
    """

    rule: Rule
    reason: str
    remedy: str


Verdict: TypeAlias = Accepted | Refused


Rank: TypeAlias = tuple[bool, int, bool, int, int]


@dataclass(frozen=True)
class Entry:
    """A candidate and what was decided of it.

    ``rank`` sorts the best first.
    """

    candidate: Candidate
    verdict: Verdict
    rank: Rank

    def __str__(self) -> str:
        """Show one line."""
        who = f"{self.candidate.name} from {self.candidate.source}"
        if isinstance(self.verdict, Refused):
            return f"{who}: refused: {self.verdict.reason}"
        return f"{who}: accepted" + (f": {self.verdict.note}" if self.verdict.note else "")


@dataclass(frozen=True)
class Trace:
    """The decision for one device.

    Attributes:
        situation: what was known.
        entries: the accepted candidates, the best first, then the refused ones as they were found.
        default_remedy: what to do if there is no candidate at all, or about the problem.
        problem: why nothing could be decided; None if candidates were judged.
    """

    situation: Situation
    entries: tuple[Entry, ...]
    default_remedy: str
    problem: str | None = None

    @property
    def chosen(self) -> Candidate | None:
        """The candidate that serves the device; None if no one does."""
        return next((entry.candidate for entry in self.accepted()), None)

    @property
    def remedy(self) -> str:
        """What to do if nothing was chosen: about the candidate that was nearest to working."""
        return self.remedy_of(self.entries)

    def remedy_of(self, entries: Iterable[Entry]) -> str:
        """Return what to do about the refused one of these that was nearest to working."""
        refusals = [entry.verdict for entry in entries if isinstance(entry.verdict, Refused)]
        # max() returns the first of equals, so among equals the best-placed candidate speaks.
        return max(refusals, key=lambda r: r.rule).remedy if refusals else self.default_remedy

    @property
    def passed_over(self) -> tuple[Entry, ...]:
        """The damaged candidates that would have been taken before the chosen one."""
        best = next((entry.rank for entry in self.accepted()), None)
        return tuple(
            entry
            for entry in self.entries
            if isinstance(entry.verdict, Refused)
            and entry.verdict.rule in _DAMAGE
            and (best is None or entry.rank < best)
        )

    def accepted(self) -> Iterator[Entry]:
        """Yield the entries that were accepted, the best first."""
        return (entry for entry in self.entries if isinstance(entry.verdict, Accepted))

    def refuse(self, refused: Entry, verdict: Refused) -> Trace:
        """Return the trace in which an accepted entry is refused after all."""
        rest = tuple(entry for entry in self.entries if entry is not refused)
        return replace(self, entries=(*rest, replace(refused, verdict=verdict)))

    def lines(self) -> list[str]:
        """Return what was looked for and what was found, as lines."""
        known = self.situation
        looked = [
            f"a {known.device.kind} pack for {known.host.machine}",
            f"flash_dmattn {known.package_version or '(not installed)'}",
        ]
        if known.abi_version is not None:
            looked.append(f"pack ABI {known.abi_version}")
        if known.device.kind == "cuda":
            looked.append(f"NVIDIA driver {known.driver}" if known.driver else "no NVIDIA driver")
        if known.device.kind != "cpu":
            looked.append(f"torch {known.torch}" if known.torch else "no torch")
        result = [f"looked for: {', '.join(looked)}"]
        if self.problem is not None:
            return [*result, f"problem: {self.problem}"]
        return [*result, "found:", *(f"  {entry}" for entry in self.entries or ("nothing",))]

    def __str__(self) -> str:
        """Show the device, what was looked for, what was found, and what serves it."""
        chosen = self.chosen
        serves = "no pack" if chosen is None else f"{chosen.name}, {chosen.path}"
        return "\n".join([f"{self.situation.device}: {serves}", *self.lines()])
