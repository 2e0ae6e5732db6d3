# SPDX-License-Identifier: BSD-3-Clause
"""Which candidates can serve a device, and which is the best: pure functions of facts.

A candidate is refused by the first of `rules.ROWS` that it breaks. The accepted ones are ranked by

1. the file that FLASH_DMATTN_LIBRARY_PATH names, then
2. the place of its arch in the device's preference, then
3. torch's CUDA major before the other one, and without torch's the newer before the older, then
4. the order in which they were found: flash_dmattn's own packs first.

Of two packs with one name, such as a distribution's and flash_dmattn's own, the first found thus
goes first; a pack from elsewhere never replaces flash_dmattn's own by being installed.

The arch counts for more than the CUDA major, because code made for another arch is slower on every
call, while packs of either major work under torch of either major.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from . import messages
from .candidates import Candidate
from .facts import Situation
from .rules import Case, Need, Wishes, notes, refusal
from .targets import Targets
from .trace import Accepted, Entry, Rank, Trace

__all__ = ["decide"]


def decide(
    situation: Situation,
    candidates: Sequence[Candidate],
    wishes: Wishes,
    targets: Targets | None,
) -> Trace:
    """Judge and rank candidates for one device.

    ``targets`` may be None for devices other than GPUs.
    """
    # A forced file for another kind of device leaves this device alone.
    forced = any(c.forced and c.device in (situation.device.kind, None) for c in candidates)
    majors = {c.cuda_major for c in candidates if c.device == "cuda" and c.cuda_major}
    need = Need(situation, wishes, targets or Targets({}, {}, {}), forced, majors)
    entries = [_judge(Case(candidate, need), place) for place, candidate in enumerate(candidates)]
    accepted = [entry for entry in entries if isinstance(entry.verdict, Accepted)]
    refused = [entry for entry in entries if not isinstance(entry.verdict, Accepted)]
    accepted.sort(key=lambda entry: entry.rank)
    return Trace(situation, (*_told_apart(accepted), *refused), need.fix_of_no_pack)


def _judge(case: Case, place: int) -> Entry:
    verdict = refusal(case) or Accepted("; ".join(notes(case)))
    return Entry(case.pack, verdict, _rank(case, place))


def _rank(case: Case, place: int) -> Rank:
    """Return a key by which the best candidate sorts first."""
    pack, archs = case.pack, case.need.archs
    arch = archs.index(pack.arch) if pack.arch in archs else 0
    major = pack.cuda_major or ""
    newest_first = -int(major) if major.isdigit() else 0
    return not pack.forced, arch, major != case.need.torch_major, newest_first, place


def _told_apart(accepted: Sequence[Entry]) -> list[Entry]:
    """Say of each accepted candidate which one of the same name goes before it."""
    first: dict[str, Candidate] = {}
    result = []
    for entry in accepted:
        winner = first.setdefault(entry.candidate.name, entry.candidate)
        if winner is not entry.candidate and isinstance(entry.verdict, Accepted):
            note = messages.SAME_NAME.format(source=winner.source)
            verdict = Accepted("; ".join(filter(None, (entry.verdict.note, note))))
            entry = replace(entry, verdict=verdict)
        result.append(entry)
    return result
