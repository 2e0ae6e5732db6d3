# SPDX-License-Identifier: BSD-3-Clause
"""One number of the benchmark, and what follows from several."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from .timing import Timing

# Divided by their times, ours say more than absolute times do.
RATIO_QUANTITIES = ("forward", "backward", "forward_backward", "end_to_end", "attention")


@dataclass(frozen=True)
class Record:
    """A quantity of a contestant in a case: a median with its quartiles, or why there is none.

    ``mask`` names what the contestant attends to; only numbers of one mask do the same work.
    ``difference`` is that of the results from the first contestant with the same mask.
    """

    case: str
    contestant: str
    role: str
    mask: str
    quantity: str
    value: float | None
    low: float | None = None
    high: float | None = None
    samples: int = 0
    difference: float | None = None
    reason: str | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """What identifies the number in a run."""
        return (self.case, self.contestant, self.quantity)


def summary(timing: Timing, calls: int = 1) -> dict[str, Any]:
    """The fields of a record that a timing fills; ``calls`` is how many it timed at once."""
    samples = [sample / calls for sample in timing.samples]
    quartiles = samples * 3
    if len(samples) > 1:
        quartiles = statistics.quantiles(samples, n=4, method="inclusive")
    return {
        "value": statistics.median(samples),
        "low": quartiles[0],
        "high": quartiles[2],
        "samples": len(samples),
    }


def short_reason(error: BaseException) -> str:
    """An exception's first sentences on one line: torch's messages go on with advice."""
    text = " ".join(str(error).split()) or type(error).__name__
    sentences = re.split(r"(?<=\.) (?=[A-Z])", text)
    return " ".join(sentences[:2])[:200]


def values(records: Iterable[Record]) -> dict[tuple[str, str, str], float]:
    """The numbers by their key."""
    return {record.key: record.value for record in records if record.value is not None}


def ratios(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Time of ours / time of another contestant, for each case and quantity."""
    timed = [r for r in records if r.value is not None and r.quantity in RATIO_QUANTITIES]
    return [
        {
            "case": ours.case,
            "quantity": ours.quantity,
            "contestant": ours.contestant,
            "to": other.contestant,
            "value": _rounded(ours.value / other.value),
        }
        for ours in timed
        if ours.role == "ours" and ours.value is not None
        for other in timed
        if (other.case, other.quantity) == (ours.case, ours.quantity)
        and other.contestant != ours.contestant
        and other.value
    ]


def to_plain(record: Record) -> dict[str, Any]:
    """A record for JSON, without what is not known and digits that mean nothing."""
    known = {name: value for name, value in asdict(record).items() if value is not None}
    return {name: _rounded(v) if isinstance(v, float) else v for name, v in known.items()}


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def from_plain(fields: dict[str, Any]) -> Record:
    """The inverse of `to_plain`."""
    return Record(**{"value": None, **fields})
