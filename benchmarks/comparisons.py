# SPDX-License-Identifier: BSD-3-Clause
"""Comparison tables of pages: over many problems, with one reference or with all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .bars import SHAPE_BARS, Bar, verdicts
from .entrants import ALL_KEYS
from .results import Record, Results
from .sets import SIZES
from .tables import COLUMNS, Table

Found = Mapping[str, Results]  # results files by name
_SHAPES, _PAIRS = "h100-shapes", "h200-pairs"
_DENSE_SHAPES = "h200-shapes"  # with FlashAttention-4
_LEAST_LOST = 1.1  # ratio to another's time from which ours counts as slower
_PASSES = ("forward", "backward", "decode")


class Judged(NamedTuple):
    """Ours compared with one reference, and the target: a line for each problem."""

    title: str
    kind: str  # the first part of the cases' names
    quantity: str
    reference: str
    file: str = _SHAPES

    def bars(self) -> list[Bar]:
        """Return the bar of each line."""
        return [bar for bar in SHAPE_BARS if self._has(bar)]

    def table(self, found: Found) -> Table:
        """Return the table, without lines for problems that were not measured."""
        if self.file not in found:
            return Table(self.title)
        results, rows = found[self.file], []
        speed = any(bar.speed for bar in self.bars())
        for verdict in verdicts(results):
            bar = verdict.bar
            if self._has(bar) and verdict.seen is not None:
                problem = _problem(results.cases[bar.key[0]])
                values = (_cell(results, key) for key in (bar.key, *bar.references))
                target = f"{'at least' if speed else 'at most'} {bar.limit:g}"
                rows.append((problem, *values, f"{verdict.seen:.2f}", target))
        unit = COLUMNS[self.quantity].unit
        ratio = f"{self.reference} / ours" if speed else f"ours / {self.reference}"
        heads = ("problem", f"ours, {unit}", f"{self.reference}, {unit}", ratio, "target")
        return Table(self.title, heads, tuple(rows), (_measured(self.file, results),))

    def _has(self, bar: Bar) -> bool:
        case, _, quantity = bar.key
        return case.partition("-")[0] == self.kind and quantity == self.quantity


class Peers(NamedTuple):
    """Ours compared with all others, naming the best: a line for each problem."""

    title: str
    kinds: tuple[str, ...]  # the first parts of the cases' names
    quantity: str
    columns: Mapping[str, str]  # contestants, ours first, and their titles
    file: str = _PAIRS

    def table(self, found: Found) -> Table:
        """Return the table, without unmeasured lines and columns; a note names these columns."""
        if self.file not in found:
            return Table(self.title)
        results, rows = found[self.file], []
        ours, *_ = self.columns
        known = {who for _, who, quantity in results.values if quantity == self.quantity}
        shown = {who: title for who, title in self.columns.items() if who in known}
        roles = {record.contestant: record.role for record in results.records}
        for name, case in results.cases.items():
            kind = name.partition("-")[0]
            mine = results.values.get((name, ours, self.quantity))
            if kind not in self.kinds or mine is None:
                continue
            keys = [(name, who, self.quantity) for who in self.columns if roles.get(who) != "ours"]
            best = min((results.values[k] for k in keys if k in results.values), default=None)
            cells = (_cell(results, (name, who, self.quantity)) for who in shown)
            ratio = "-" if best is None or not mine else f"{best / mine:.2f}"
            in_words = len(self.kinds) > 1 or case["pair_bias"]
            label = f"{kind}: {_in_words(case)}" if in_words else _problem(case)
            rows.append((label, *cells, ratio))
        heads = ("", *shown.values(), f"best of the others / {self.columns[ours]}")
        absent = [title for who, title in self.columns.items() if who not in known]
        notes = [f"not measured in this run: {', '.join(absent)}"] if absent else []
        notes.append(_measured(self.file, results, results.peers))
        return Table(self.title, heads, tuple(rows), tuple(notes))


def slower_table(found: Found) -> Table:
    """Return the cases where the fastest other with the same mask is faster than our fastest.

    A problem in several files is shown with its latest measurement. Host times are excluded, and
    calls without a mask, which have a table of their own.
    """
    rows: dict[tuple[str, ...], tuple[str, ...]] = {}
    files: dict[tuple[str, ...], str] = {}
    for file, results in sorted(found.items(), key=lambda item: str(item[1].environment["date"])):
        groups: dict[tuple[str, str, str], list[Record]] = {}
        for record in results.records:
            if record.value and record.quantity in _PASSES and record.mask != ALL_KEYS:
                groups.setdefault((record.case, record.quantity, record.mask), []).append(record)
        for (case, quantity, mask), records in groups.items():
            ours = [(r.value or 0.0, r.contestant) for r in records if r.role == "ours"]
            others = [(r.value or 0.0, r.contestant) for r in records if r.role != "ours"]
            if ours and others:
                (mine, _), (best, name) = min(ours), min(others)
                key = (_short(results), _masked(results.cases[case], mask), quantity)
                cells = (COLUMNS[quantity].cell(mine), f"{COLUMNS[quantity].cell(best)} ({name})")
                rows.pop(key, None)
                if mine / best >= _LEAST_LOST:
                    rows[key], files[key] = (*cells, f"{mine / best:.2f}"), file
    used = dict.fromkeys(files[key] for key in rows)
    note = f"measured: {', '.join(f'{file} ({found[file].commit})' for file in used)}"
    heads = ("machine", "problem", "pass", "ours, ms", "fastest other, ms", "ours / other")
    title = "Another implementation of the same attention is faster by 10 % or more"
    lines = tuple((*key, *rows[key]) for key in sorted(rows))
    return Table(title, heads, lines, (note,) if rows else ())


def _short(results: Results) -> str:
    """Return a machine's name without its memory size."""
    return results.machine.removeprefix("NVIDIA ").partition(" 80GB")[0]


def _masked(case: Mapping[str, Any], mask: str) -> str:
    """Return a case by its numbers, with its mask and bias."""
    if mask == ALL_KEYS:
        return f"{_problem({**case, 'window': None})}; no mask"
    return f"{_problem(case)}{'; bias per query' if case['per_query'] else ''}"


def _cell(results: Results, key: tuple[str, str, str]) -> str:
    return COLUMNS[key[2]].cell(results.values.get(key))


def _problem(case: Mapping[str, Any]) -> str:
    """Return a case by its numbers, in the order of the pages."""
    return ", ".join(str(case[size]) for size in SIZES if case[size] is not None)


def _in_words(case: Mapping[str, Any]) -> str:
    heads = f"{case['heads']} heads of {case['head_dim']}"
    return f"{case['batch']} x {case['length']} tokens, {heads}"


def _measured(file: str, results: Results, peers: str = "") -> str:
    where = ", ".join(filter(None, (results.machine, peers, results.commit)))
    return f"measured: {file} ({where})"


_PAIR_COLUMNS = {
    "pair_bias": "flash_dmattn",
    "cuequivariance": "cuEquivariance",
    "trifast": "trifast",
    "pair_flex": "FlexAttention",
    "pair_sdpa": "SDPA",
}


def _peers(what: str, *kinds: str) -> tuple[Peers, ...]:
    columns = dict(_PAIR_COLUMNS)
    if "triangle" not in kinds:
        del columns["trifast"]
    return (
        Peers(f"{what}: forward, ms", kinds, "forward", columns),
        Peers(f"{what}: forward and backward, ms", kinds, "forward_backward", columns),
        Peers(f"{what}: peak extra memory of both, MiB", kinds, "memory_forward_backward", columns),
    )


_HOST_COLUMNS = {
    "window_size": "with a window",
    "no_mask": "without",
    "dense_sdpa": "SDPA",
    "dense_cudnn": "SDPA bound to cuDNN",
}


def _host(what: str, quantity: str) -> Peers:
    return Peers(f"Time of the host: {what}, µs", ("host",), quantity, _HOST_COLUMNS, _SHAPES)


def _earlier(what: str, file: str) -> Peers:
    columns = {"boolean": "flash_dmattn", "earlier": "flash-dmattn 1.2.2", "sdpa": "SDPA"}
    return Peers(f"{what}, ms", ("length", "dim"), what.lower(), columns, file)


def _unmasked(what: str, quantity: str) -> Peers:
    columns = {"no_mask": "flash_dmattn", "dense_cudnn": "cuDNN", "dense_fa4": "FlashAttention-4"}
    return Peers(f"{what} without a mask, ms", ("unmasked",), quantity, columns, _DENSE_SHAPES)


_COMPACT, _DENSE = "compact cuDNN", "dense cuDNN"
# The tables of each block of a page.
COMPARISONS: dict[str, tuple[Judged | Peers, ...]] = {
    "compact-forward": (
        Judged("Forward over kept keys", "compact", "forward", _COMPACT, _DENSE_SHAPES),
    ),
    "compact-backward": (
        Judged("Backward over kept keys", "compact", "backward", _COMPACT, _DENSE_SHAPES),
    ),
    "unmasked": (
        _unmasked("Forward", "forward"),
        _unmasked("Forward and backward", "forward_backward"),
    ),
    "short-calls": (Judged("Selection, forward and backward", "short", "end_to_end", _DENSE),),
    "host-calls": (
        _host("forward without gradients", "host"),
        _host("forward and backward", "host_forward_backward"),
    ),
    "earlier": (
        _earlier("Forward", "h200-legacy-earlier-forward"),
        _earlier("Backward", "h200-legacy-earlier-backward"),
    ),
    "triangle": _peers("Triangle attention", "triangle"),
    "relative-bias": _peers("A bias that the batch shares", "t5", "single", "swin"),
}
