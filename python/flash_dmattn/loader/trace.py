# SPDX-License-Identifier: BSD-3-Clause
"""The loader's decision for one device, and its reasons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from .candidates import Candidate
from .facts import Situation

if TYPE_CHECKING:
    from flash_dmattn._core import Pack


class Rule(IntEnum):
    """Reasons to refuse a candidate, in the order of checks: later ones are closer to working."""

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


class Entry(NamedTuple):
    """A candidate and the decision about it."""

    candidate: Candidate
    rank: tuple[bool, int, bool, int, int]  # sorts the best first
    rule: Rule | None  # the rule that refused it; None if it can serve the device
    reason: str  # why it was refused, or a note on it; "" for none
    remedy: str = ""  # the command or step that resolves a refusal
    trial: bool = False  # whether it serves only after its self-test passes on the device

    def __str__(self) -> str:
        verdict = "accepted" if self.rule is None else "refused"
        parts = [f"{self.candidate.name} from {self.candidate.source}", verdict, self.reason]
        return ": ".join(filter(None, parts))


@dataclass(frozen=True)
class Trace:
    """The decision for one device.

    Attributes:
        situation: the known facts.
        entries: the accepted candidates, the best first, then the refused ones in the order found.
        default_remedy: the remedy if there is no candidate, or for the problem.
        problem: why no decision was possible; None if candidates were judged.
        pack: the chosen candidate, opened.
    """

    situation: Situation
    entries: tuple[Entry, ...]
    default_remedy: str
    problem: str | None = None
    pack: Pack | None = None

    def accepted(self) -> Iterator[Entry]:
        """Yield the entries that can serve the device, the best first."""
        return (entry for entry in self.entries if entry.rule is None)

    @property
    def chosen(self) -> Candidate | None:
        """The candidate that serves the device; None if there is none."""
        return next((entry.candidate for entry in self.accepted()), None)

    @property
    def remedy(self) -> str:
        """The remedy if no candidate was chosen: that of the candidate closest to working."""
        return self.remedy_of(self.entries)

    def remedy_of(self, entries: Iterable[Entry]) -> str:
        """Return the remedy of the refused entry that is closest to working."""
        # max() returns the first of equals, which is the best-ranked candidate.
        nearest = max(entries, key=lambda entry: entry.rule or 0, default=None)
        return nearest.remedy if nearest and nearest.rule else self.default_remedy

    @property
    def passed_over(self) -> tuple[Entry, ...]:
        """The damaged candidates that rank before the chosen one."""
        ranks = [entry.rank for entry in self.accepted()]
        damaged = (e for e in self.entries if e.rule in (Rule.DEFECT, Rule.OPENING))
        return tuple(entry for entry in damaged if not ranks or entry.rank < ranks[0])

    def refuse(self, refused: Entry, rule: Rule, reason: str, remedy: str) -> Trace:
        """Return the trace with an accepted entry refused."""
        rest = (entry for entry in self.entries if entry is not refused)
        last = refused._replace(rule=rule, reason=reason, remedy=remedy)
        return replace(self, entries=(*rest, last))

    def settle(self, tried: Entry, reason: str) -> Trace:
        """Return the trace with an accepted entry whose self-test has passed."""
        passed = tried._replace(reason=reason, trial=False)
        return replace(self, entries=tuple(passed if e is tried else e for e in self.entries))

    def lines(self) -> list[str]:
        """Return what was searched and what was found, as lines."""
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
        chosen = self.chosen
        serves = "no pack" if chosen is None else f"{chosen.name}, {chosen.path}"
        return "\n".join([f"{self.situation.device}: {serves}", *self.lines()])
