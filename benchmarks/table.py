# SPDX-License-Identifier: BSD-3-Clause
"""Tables, and those of a run: one for each case, one for each quantity of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tabulate import tabulate

from .cases import shape_text
from .quantities import COLUMNS
from .results import Record, Results


@dataclass(frozen=True)
class Table:
    """A title, the heads of the columns, rows of as many cells, and remarks below.

    Without rows the heads are not shown either.
    """

    title: str
    heads: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """For a terminal: the first column to the left, the others to the right."""
        align = ("left", *["right"] * (len(self.heads) - 1))
        body = tabulate(self.rows, self.heads, colalign=align, disable_numparse=True)
        return "\n".join([self.title, *([body] if self.rows else []), *self.notes])

    def markdown(self) -> str:
        """For a page."""
        body = tabulate(self.rows, self.heads, tablefmt="github", disable_numparse=True)
        notes = "\n".join(f"* {note}" for note in self.notes)
        return "\n\n".join(filter(None, [f"**{self.title}**", body if self.rows else "", notes]))


def run_tables(results: Results) -> list[Table]:
    """Everything that was measured."""
    swept = {name for names in results.sweeps.values() for name in names}
    tables = [_case_table(results, name) for name in results.cases if name not in swept]
    for sweep, names in results.sweeps.items():
        tables += _sweep_tables(results, sweep, names)
    return tables


def _case_table(results: Results, name: str) -> Table:
    case, known = results.cases[name], results.values
    records = [record for record in results.records if record.case == name]
    columns = [q for q in COLUMNS if any(r.quantity == q and r.value is not None for r in records)]
    masks = {record.contestant: record.mask for record in records}
    rows = tuple(
        (
            who,
            masks[who],
            *(_cell(quantity, known.get((name, who, quantity))) for quantity in columns),
        )
        for who in case["contestants"]
        if who in masks
    )
    heads = ("", "attends to", *(COLUMNS[quantity].head for quantity in columns))
    notes = tuple(f"{r.contestant}, {r.quantity}: {r.reason}" for r in records if r.reason)
    return Table(f"{name} ({shape_text(case)})", heads, rows, notes)


def _sweep_tables(results: Results, sweep: str, names: Sequence[str]) -> list[Table]:
    known = results.values
    records = [record for record in results.records if record.case in names]
    first = f"(first: {shape_text(results.cases[names[0]])})"
    tables = []
    for name, quantity in COLUMNS.items():
        shown = dict.fromkeys(r.contestant for r in records if r.quantity == name and r.value)
        rows = tuple(
            (case, *(_cell(name, known.get((case, who, name))) for who in shown)) for case in names
        )
        if shown:
            title = f"{sweep}: {quantity.about}, {quantity.unit} {first}"
            tables.append(Table(title, ("", *shown), rows))
    last = tables.pop() if tables else Table(f"{sweep} {first}")
    return [*tables, replace(last, notes=_sweep_notes(names, records))]


def _cell(quantity: str, value: float | None) -> str:
    return "-" if value is None else COLUMNS[quantity].cell(value)


def _sweep_notes(names: Sequence[str], records: Sequence[Record]) -> tuple[str, ...]:
    """Reasons, each once, with the cases that it is of."""
    reasons: dict[str, dict[str, None]] = {}
    for record in records:
        if record.reason is not None:
            # What was not begun is so for all contestants from some place on.
            begun = record.quantity != "all"
            text = f"{record.contestant}, {record.quantity}: " if begun else "some or all: "
            reasons.setdefault(text + record.reason, {})[record.case] = None
    return tuple(
        f"{text} ({'every case' if len(cases) == len(names) else ', '.join(cases)})"
        for text, cases in reasons.items()
    )
