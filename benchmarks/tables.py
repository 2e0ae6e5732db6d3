# SPDX-License-Identifier: BSD-3-Clause
"""The quantities, and the tables of a run: one per case, or one per quantity of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tabulate import tabulate

from .cases import Pass, shape_text
from .results import Record, Results

# The value of each unit in seconds, bytes or as a plain number, and the shown digits.
_UNITS = {
    "ms": (1e-3, 3),
    "us": (1e-6, 1),
    "MiB": (float(1 << 20), 0),
    "nats": (1.0, 3),
    "steps": (1.0, 0),
}


class Quantity(NamedTuple):
    """A quantity's meaning, its column head, its unit there, and its pass.

    Times are in seconds, on the device except for ``host``, and memory is in bytes.
    """

    about: str
    head: str
    which: Pass = "forward"
    unit: str = "ms"

    @property
    def scale(self) -> float:
        """The value of one unit in seconds or bytes, or 1."""
        return _UNITS[self.unit][0]

    def cell(self, value: float | None) -> str:
        """Return the number as a cell of a table."""
        return "-" if value is None else f"{value / self.scale:.{_UNITS[self.unit][1]}f}"


_BOTH: Pass = "forward_backward"
QUANTITIES = {
    "selection": Quantity("making the mask from the bias", "mask ms"),
    "plan": Quantity("the plan alone", "plan ms"),
    "forward": Quantity("forward, plan included", "fwd ms"),
    "forward_planned": Quantity("forward with a plan made before", "plan reused ms"),
    "forward_with_mask": Quantity("making the mask, and forward", "mask+fwd ms"),
    "backward": Quantity("backward, with the bias's gradient if there is a bias", "bwd ms", _BOTH),
    "forward_backward": Quantity("forward and backward", "fwd+bwd ms", _BOTH),
    "end_to_end": Quantity("making the mask, forward and backward", "all ms", _BOTH),
    "host": Quantity("host time of a forward call without gradients", "host us", unit="us"),
    "host_forward_backward": Quantity(
        "host time of forward and backward", "host fwd+bwd us", _BOTH, "us"
    ),
    "memory_forward": Quantity("peak extra memory of forward", "fwd MiB", unit="MiB"),
    "memory_forward_backward": Quantity(
        "peak extra memory of forward and backward", "fwd+bwd MiB", _BOTH, "MiB"
    ),
    "memory_with_mask": Quantity("the same with making the mask", "with mask MiB", _BOTH, "MiB"),
}
DECODE_QUANTITIES = ("selection", "plan", "forward", "forward_planned", "forward_with_mask")

_IN_ATTENTION = "making masks, and the attention function"
GENERATE_QUANTITIES = {
    "prefill_attention": Quantity(
        f"{_IN_ATTENTION}, while the prompt is read", "prefill, attention ms"
    ),
    "decode_attention": Quantity(
        f"{_IN_ATTENTION}, while tokens are generated", "decoding, attention ms"
    ),
    "attention": Quantity(f"{_IN_ATTENTION}, of both", "attention ms"),
    "prefill": Quantity("reading the prompt, the whole model", "prefill ms"),
    "decode": Quantity("generating the tokens, the whole model", "decoding ms"),
    "generate": Quantity("both, the whole model", "all ms"),
    "memory_generate": Quantity("peak extra memory of both", "extra MiB", unit="MiB"),
}
TRAIN_QUANTITIES = {
    "train_step": Quantity("forward, backward and AdamW of a whole model", "step ms"),
    "memory_train": Quantity("peak memory of a step, beyond weights", "extra MiB", unit="MiB"),
}
COLUMNS = {**QUANTITIES, **GENERATE_QUANTITIES, **TRAIN_QUANTITIES}


def about(quantities: Mapping[str, Quantity]) -> dict[str, str]:
    """Return the meaning of each quantity, in the form of results files."""
    return {name: quantity.about for name, quantity in quantities.items()}


@dataclass(frozen=True)
class Table:
    """A title, the column heads, rows with as many cells, and notes below.

    Without rows the heads are not shown.
    """

    title: str
    heads: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return Markdown for pages and terminals."""
        body = tabulate(self.rows, self.heads, tablefmt="github", disable_numparse=True)
        notes = "\n".join(f"* {note}" for note in self.notes)
        return "\n\n".join(filter(None, [f"**{self.title}**", body if self.rows else "", notes]))


def run_tables(results: Results) -> list[Table]:
    """Return the tables of everything that was measured."""
    swept = {name for names in results.sweeps.values() for name in names}
    tables = [_case_table(results, name) for name in results.cases if name not in swept]
    for sweep, names in results.sweeps.items():
        tables += _sweep_tables(results, sweep, names)
    return tables


def _case_table(results: Results, name: str) -> Table:
    """Return all measurements of a case, with a line for each contestant."""
    case, known = results.cases[name], results.values
    records = [record for record in results.records if record.case == name]
    measured = {record.quantity for record in records if record.value is not None}
    columns = {name: quantity for name, quantity in COLUMNS.items() if name in measured}
    masks = {record.contestant: record.mask for record in records}
    rows = tuple(
        (who, masks[who], *(columns[what].cell(known.get((name, who, what))) for what in columns))
        for who in case["contestants"]
        if who in masks
    )
    heads = ("", "attends to", *(quantity.head for quantity in columns.values()))
    notes = tuple(f"{r.contestant}, {r.quantity}: {r.reason}" for r in records if r.reason)
    return Table(f"{name} ({shape_text(case)})", heads, rows, notes)


def _sweep_tables(results: Results, sweep: str, names: Sequence[str]) -> list[Table]:
    known = results.values
    records = [record for record in results.records if record.case in names]
    first = f"(first: {shape_text(results.cases[names[0]])})"
    tables = []
    for what, quantity in COLUMNS.items():
        shown = dict.fromkeys(r.contestant for r in records if r.quantity == what and r.value)
        rows = tuple(
            (case, *(quantity.cell(known.get((case, who, what))) for who in shown))
            for case in names
        )
        if shown:
            title = f"{sweep}: {quantity.about}, {quantity.unit} {first}"
            tables.append(Table(title, ("", *shown), rows))
    last = tables.pop() if tables else Table(f"{sweep} {first}")
    return [*tables, replace(last, notes=_sweep_notes(names, records))]


def _sweep_notes(names: Sequence[str], records: Sequence[Record]) -> tuple[str, ...]:
    """Return each reason once, with its cases."""
    reasons: dict[str, dict[str, None]] = {}
    for record in records:
        if record.reason is not None:
            # Steps that were not started are missing for all contestants from some case on.
            begun = record.quantity != "all"
            text = f"{record.contestant}, {record.quantity}: " if begun else "some or all: "
            reasons.setdefault(text + record.reason, {})[record.case] = None
    return tuple(
        f"{text} ({'every case' if len(cases) == len(names) else ', '.join(cases)})"
        for text, cases in reasons.items()
    )
