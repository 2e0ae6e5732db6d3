# SPDX-License-Identifier: BSD-3-Clause
"""A few numbers of many results side by side: the tables with which pages begin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .contestants.entrants import ALL_KEYS
from .environment import machine
from .records import Record
from .results import records_of
from .tables import Table

_MIB = 1 << 20


@dataclass(frozen=True)
class Line:
    """A number of ours that is worth a line; without a label, its machine and case name it."""

    file: str
    case: str
    ours: str
    quantity: str
    label: str = ""


_OF_H200 = ("forward", "backward", "forward_backward")

# By the names of the blocks.
HEADLINES: dict[str, tuple[Line, ...]] = {
    "summary": (
        Line("h200", "heads32-8k", "intervals", "forward"),
        Line("h200", "heads32-8k", "intervals", "backward"),
        Line("h200", "growth-64k", "intervals", "forward"),
        Line("h200", "growth-64k", "intervals", "backward"),
        Line("h200", "decode-64k", "key_mask", "forward"),
        Line("h200-legacy-forward", "length-32768", "boolean", "forward"),
        Line("h200-legacy-backward", "length-16384", "boolean", "backward"),
        Line("h200-generate", "generate-16k", "flash_dmattn", "attention"),
        Line("cpu", "masked-4k", "intervals", "forward"),
        Line("cpu", "masked-4k", "intervals", "forward_backward"),
        Line("cpu-legacy-forward", "length-4096", "boolean", "forward"),
        Line("cpu-legacy-backward", "length-2048", "boolean", "backward"),
        Line("cpu-generate", "generate-2k", "flash_dmattn", "attention"),
    ),
    "readme-cpu": (
        Line("cpu", "masked-4k", "intervals", "forward", "forward"),
        Line("cpu", "masked-4k", "intervals", "forward_backward", "forward + backward"),
        Line(
            *("cpu", "masked-4k", "intervals", "memory_with_mask"),
            "extra memory, forward + backward, mask included",
        ),
        Line("cpu", "dense-4k-float32", "no_mask", "forward", "without a mask, forward"),
    ),
    "readme-h200": (
        *(
            Line("h200", "heads32-8k", "intervals", quantity, quantity.replace("_", " + "))
            for quantity in _OF_H200
        ),
        Line(
            *("h200", "decode-64k", "key_mask", "forward"),
            "one token decoded, 1024 of 65,536 cached keys",
        ),
    ),
}


def headlines(name: str, found: Mapping[str, dict[str, Any]]) -> Table:
    """Ours beside the fastest with the same mask and the fastest dense attention, line by line."""
    rows = []
    machines = []
    for line in HEADLINES[name]:
        if line.file not in found:
            continue
        records = [
            record
            for record in records_of(found[line.file])
            if (record.case, record.quantity) == (line.case, line.quantity)
            and record.value is not None
        ]
        mine = next((r for r in records if r.contestant == line.ours), None)
        if mine is None:
            continue
        where = machine(found[line.file]["environment"])
        machines.append(where)
        label = line.label or f"{where}: {line.case}, {line.quantity.replace('_', ' + ')}"
        masked = [r for r in records if r.role != "ours" and r.mask == mine.mask != ALL_KEYS]
        dense = [r for r in records if r.role == "baseline" and r.mask == ALL_KEYS]
        rows.append((label, _shown(mine), _beside(masked, mine), _beside(dense, mine)))
    heads = ("", "flash_dmattn", "best with the same mask", "best dense, no mask")
    title = "At a glance" if name == "summary" else ", ".join(dict.fromkeys(machines))
    return Table(title, heads, tuple(rows))


def _shown(record: Record) -> str:
    value = record.value or 0.0
    if record.quantity.startswith("memory"):
        return f"{value / _MIB:.3g} MiB" if value < 1000 * _MIB else f"{value / _MIB:.0f} MiB"
    milliseconds = value * 1e3
    return f"{milliseconds:.3g} ms" if milliseconds < 1000 else f"{milliseconds:.0f} ms"


def _beside(others: list[Record], mine: Record) -> str:
    """The least of others, and by what it is more than ours."""
    best = min(others, key=lambda record: record.value or 0.0, default=None)
    if best is None or not best.value or not mine.value:
        return "-"
    return f"{_shown(best)} ({best.contestant}), {best.value / mine.value:.2g} x"
