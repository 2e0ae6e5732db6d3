# SPDX-License-Identifier: BSD-3-Clause
"""The bars that the kernels are held to on one H200 and on CPUs, and how a run stands against them.

A tool for maintainers: no test asks how fast a machine is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .records import Record, values
from .sets import GPU
from .tables import Table

Key = tuple[str, str, str]
_FIRST, _SECOND, _THIRD = "heads32-8k", "heads16-16k", "heads2-32k"


@dataclass(frozen=True)
class Bar:
    """A bound on ``measured / (reference * scale)``; without a reference on ``measured / scale``.

    Of several references the least counts. ``speed`` turns the ratio over: the reference by ours,
    bounded from below.
    """

    work: str
    measured: Key
    limit: float
    unit: str = "x"
    references: tuple[Key, ...] = ()
    scale: float = 1.0
    speed: bool = False


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


def _against_compact(case: str, quantity: str, limit: float) -> Bar:
    work = f"{case}: intervals, {quantity}, of FA2 on w compacted keys"
    key = (case, "intervals", quantity)
    return Bar(work, key, limit, references=((case, "compact_flash", quantity),))


def _key_mask(case: str, quantity: str) -> Bar:
    work = f"{case}: key mask, {quantity}, of the intervals' time"
    return Bar(work, (case, "key_mask", quantity), 0.7, references=((case, "intervals", quantity),))


def _no_mask(quantity: str, limit: float) -> Bar:
    work = f"dense-8k: no mask, {quantity}, speed of dense FA2"
    reference = ("dense-8k", "dense_flash", quantity)
    return Bar(work, ("dense-8k", "no_mask", quantity), limit, references=(reference,), speed=True)


def _milliseconds(work: str, measured: Key, limit: float) -> Bar:
    return Bar(work, measured, limit, unit="ms", scale=1e-3)


def _memory(case: str) -> Bar:
    return Bar(
        f"{case}: intervals, forward and backward, peak extra memory, of the bytes of q",
        (case, "intervals", "memory_forward_backward"),
        8.0,
        scale=GPU.workloads[case].shape.query_bytes,
    )


def _growth(quantity: str) -> Bar:
    return Bar(
        f"growth 8k to 64k: intervals, {quantity}, of linear growth",
        ("growth-64k", "intervals", quantity),
        1.15,
        references=(("growth-8k", "intervals", quantity),),
        scale=65536 / 8192,
    )


BARS: tuple[Bar, ...] = (
    _against_compact(_FIRST, "forward", 1.1),
    _against_compact(_FIRST, "backward", 1.1),
    _against_compact(_SECOND, "forward", 1.05),
    _against_compact(_SECOND, "backward", 1.1),
    _against_compact(_THIRD, "forward", 1.3),
    _against_compact(_THIRD, "backward", 0.25),
    *(_key_mask(case, q) for case in (_FIRST, _SECOND, _THIRD) for q in ("forward", "backward")),
    _milliseconds(f"{_FIRST}: boolean, forward", (_FIRST, "boolean", "forward"), 0.75),
    _milliseconds(f"{_FIRST}: selection", (_FIRST, "intervals", "selection"), 0.08),
    _milliseconds("selection-32k: selection", ("selection-32k", "intervals", "selection"), 0.4),
    _no_mask("forward", 0.9),
    _no_mask("backward", 0.85),
    _milliseconds(
        "decode-64k: key mask, plan reused", ("decode-64k", "key_mask", "forward_planned"), 0.03
    ),
    _milliseconds("decode-64k: key mask, with plan", ("decode-64k", "key_mask", "forward"), 0.06),
    _memory(_THIRD),
    _memory("growth-32k"),
    _growth("forward"),
    _growth("backward"),
    Bar(
        f"{_FIRST}: intervals, host time of a forward call",
        (_FIRST, "intervals", "host"),
        25.0,
        unit="us",
        scale=1e-6,
    ),
)


_SDPA_FORMS = ("sdpa_expanded", "sdpa_gqa", "sdpa")


def _against_sdpa(case: str, ours: str, quantity: str, limit: float) -> Bar:
    references = tuple((case, form, quantity) for form in _SDPA_FORMS)
    work = f"{case}: {ours}, {quantity.replace('_', ' ')}, best form of SDPA by ours"
    return Bar(work, (case, ours, quantity), limit, references=references, speed=True)


CPU_BARS: tuple[Bar, ...] = (
    _against_sdpa("masked-4k", "intervals", "forward", 8.0),
    _against_sdpa("masked-4k", "intervals", "forward_backward", 6.0),
    _against_sdpa("masked-4k", "intervals", "memory_with_mask", 10.0),
    *(
        _against_sdpa(case, "no_mask", quantity, 1 / 2.5)
        for case in ("dense-4k-float32", "dense-4k-float32-full")
        for quantity in ("forward", "forward_backward")
    ),
)

GENERATE_BARS: tuple[Bar, ...] = (
    Bar(
        "generate-16k: flash_dmattn, time in attention, of eager attention's",
        ("generate-16k", "flash_dmattn", "attention"),
        0.25,
        references=(("generate-16k", "eager", "attention"),),
    ),
)


def bars_of(results: Mapping[str, Any]) -> tuple[Bar, ...]:
    """The bars that are meant for a file of results."""
    if any(name.startswith("generate") for name in results["cases"]):
        return GENERATE_BARS
    return BARS if results["environment"]["gpu"] else CPU_BARS


def verdicts(records: Iterable[Record], bars: Sequence[Bar] = BARS) -> list[Verdict]:
    """How each bar stands, by the numbers of one run."""
    known = values(records)
    return [_verdict(bar, known) for bar in bars]


def _verdict(bar: Bar, known: Mapping[Key, float]) -> Verdict:
    measured = known.get(bar.measured)
    found = [known[key] for key in bar.references if key in known]
    if measured is None or (bar.references and not found):
        return Verdict(bar, None)
    reference = min(found, default=1.0)
    ratio = max(measured, 1e-12) / (reference * bar.scale)
    detail = ""
    if bar.references:
        memory = bar.measured[2].startswith("memory")
        unit, size = ("MiB", 1 << 20) if memory else ("ms", 1e-3)
        detail = f"{measured / size:.3f} {unit}, {reference / size:.3f} {unit}"
    return Verdict(bar, 1 / ratio if bar.speed else ratio, detail)


def bars_table(found: Iterable[Verdict]) -> Table:
    """The bars with what was seen, for people."""
    rows = []
    for verdict in found:
        bar = verdict.bar
        bound = f"{'>=' if bar.speed else '<='} {bar.limit:g} {bar.unit}"
        seen = "-" if verdict.seen is None else f"{verdict.seen:.3f} {bar.unit}"
        outcome = {True: "pass", False: "MISS", None: "not measured"}[verdict.met]
        rows.append((bar.work, bound, seen, verdict.detail, outcome))
    return Table(
        "What the kernels are held to", ("work", "bar", "seen", "ours, reference", ""), tuple(rows)
    )
