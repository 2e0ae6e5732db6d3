# SPDX-License-Identifier: BSD-3-Clause
"""The bars that the kernels are held to on one H200 and on CPUs, and how a run stands against them.

A tool for maintainers: no test asks how fast a machine is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .quantities import COLUMNS
from .results import Results
from .sets import GPU
from .table import Table

Key = tuple[str, str, str]  # case, contestant, quantity


@dataclass(frozen=True)
class Bar:
    """A bound on ``measured / (reference * scale)``; without a reference on ``measured / scale``.

    Of several references the least counts. ``speed`` turns the ratio over: the reference by ours,
    bounded from below.
    """

    about: str
    measured: Key
    limit: float
    references: tuple[Key, ...] = ()
    scale: float = 1.0
    unit: str = "x"
    speed: bool = False

    @property
    def work(self) -> str:
        """What the bound is of, in words."""
        case, who, quantity = self.measured
        about = f", {self.about}" if self.about else ""
        return f"{case}: {who}, {quantity.replace('_', ' ')}{about}"


@dataclass(frozen=True)
class Verdict:
    """What was seen for a bar; None where the run has no numbers for it."""

    bar: Bar
    seen: float | None
    detail: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the bar is met."""
        if self.seen is None:
            return None
        return self.seen >= self.bar.limit if self.bar.speed else self.seen <= self.bar.limit


def _beside(
    case: str,
    who: str,
    others: Sequence[str],
    limits: dict[str, float],
    about: str,
    speed: bool = False,
) -> list[Bar]:
    """A bar for each quantity, by the same quantity of others in the same case."""
    return [
        Bar(about, (case, who, q), limit, tuple((case, o, q) for o in others), speed=speed)
        for q, limit in limits.items()
    ]


def _at_most(case: str, who: str, quantity: str, limit: float) -> Bar:
    unit = COLUMNS[quantity].unit
    return Bar("", (case, who, quantity), limit, scale=COLUMNS[quantity].scale, unit=unit)


def _memory(case: str) -> Bar:
    query_bytes = GPU.workloads[case].shape.query_bytes
    key = (case, "intervals", "memory_forward_backward")
    return Bar("of the bytes of q", key, 8.0, scale=query_bytes)


def _growth(quantity: str) -> Bar:
    """From 8k to 64k tokens."""
    measured, first = ((f"growth-{n}k", "intervals", quantity) for n in (64, 8))
    return Bar("of linear growth from growth-8k", measured, 1.15, (first,), scale=8)


_COMPACT = {
    "heads32-8k": {"forward": 1.1, "backward": 1.1},
    "heads16-16k": {"forward": 1.05, "backward": 1.1},
    "heads2-32k": {"forward": 1.3, "backward": 0.25},
}
_KEYS = {"forward": 0.7, "backward": 0.7}

BARS: tuple[Bar, ...] = (
    *(
        bar
        for case, limits in _COMPACT.items()
        for bar in _beside(
            case, "intervals", ["compact_flash"], limits, "of FA2 on w compacted keys"
        )
    ),
    *(
        bar
        for case in _COMPACT
        for bar in _beside(case, "key_mask", ["intervals"], _KEYS, "of the intervals' time")
    ),
    _at_most("heads32-8k", "boolean", "forward", 0.75),
    _at_most("heads32-8k", "intervals", "selection", 0.08),
    _at_most("selection-32k", "intervals", "selection", 0.4),
    *_beside(
        "dense-8k",
        "no_mask",
        ["dense_flash"],
        {"forward": 0.9, "backward": 0.85},
        "speed of dense FA2",
        speed=True,
    ),
    _at_most("decode-64k", "key_mask", "forward_planned", 0.03),
    _at_most("decode-64k", "key_mask", "forward", 0.06),
    _memory("heads2-32k"),
    _memory("growth-32k"),
    _growth("forward"),
    _growth("backward"),
    _at_most("heads32-8k", "intervals", "host", 25.0),
)

_SDPA = ["sdpa_expanded", "sdpa_gqa", "sdpa"]
_MASKED = {"forward": 8.0, "forward_backward": 6.0, "memory_with_mask": 10.0}
_DENSE = dict.fromkeys(("forward", "forward_backward"), 1 / 2.5)

CPU_BARS: tuple[Bar, ...] = tuple(
    bar
    for case, who, limits in (
        ("masked-4k", "intervals", _MASKED),
        ("dense-4k-float32", "no_mask", _DENSE),
        ("dense-4k-float32-full", "no_mask", _DENSE),
    )
    for bar in _beside(case, who, _SDPA, limits, "best form of SDPA by ours", speed=True)
)

GENERATE_BARS: tuple[Bar, ...] = tuple(
    _beside("generate-16k", "flash_dmattn", ["eager"], {"attention": 0.25}, "of eager attention's")
)


def verdicts(results: Results) -> list[Verdict]:
    """How each bar that is meant for a run stands, by its numbers."""
    bars = BARS if results.environment["gpu"] else CPU_BARS
    if any(name.startswith("generate") for name in results.cases):
        bars = GENERATE_BARS
    return [_verdict(bar, results.values) for bar in bars]


def _verdict(bar: Bar, known: dict[Key, float]) -> Verdict:
    measured = known.get(bar.measured)
    found = [known[key] for key in bar.references if key in known]
    if measured is None or (bar.references and not found):
        return Verdict(bar, None)
    reference = min(found, default=1.0)
    ratio = max(measured, 1e-12) / (reference * bar.scale)
    quantity = COLUMNS[bar.measured[2]]
    detail = ", ".join(f"{v / quantity.scale:.3f} {quantity.unit}" for v in (measured, reference))
    return Verdict(bar, 1 / ratio if bar.speed else ratio, detail if bar.references else "")


def bars_table(found: Sequence[Verdict]) -> Table:
    """The bars with what was seen, for people."""
    rows = []
    for verdict in found:
        bar = verdict.bar
        bound = f"{'>=' if bar.speed else '<='} {bar.limit:g} {bar.unit}"
        seen = "-" if verdict.seen is None else f"{verdict.seen:.3f} {bar.unit}"
        outcome = {True: "pass", False: "MISS", None: "not measured"}[verdict.met]
        rows.append((bar.work, bound, seen, verdict.detail, outcome))
    heads = ("work", "bar", "seen", "ours, reference", "")
    return Table("What the kernels are held to", heads, tuple(rows))
