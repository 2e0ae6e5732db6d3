# SPDX-License-Identifier: BSD-3-Clause
"""A run as JSON, and as tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .records import Record, from_plain, ratios, to_plain
from .tables import Table
from .workloads import QUANTITIES, Workload

# 1 was the format of the first benchmark on CPUs.
SCHEMA = 2
_MIB = 1 << 20
# Below this many cases of one sweep a table for each of them says more.
_LEAST_OF_A_SWEEP = 3


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _mebibytes(size: float) -> str:
    return f"{size / _MIB:.0f}"


# Quantity, head of the column, and what turns its number into the cell.
COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("selection", "mask ms", _milliseconds),
    ("plan", "plan ms", _milliseconds),
    ("forward", "fwd ms", _milliseconds),
    ("forward_planned", "plan reused ms", _milliseconds),
    ("forward_with_mask", "mask+fwd ms", _milliseconds),
    ("backward", "bwd ms", _milliseconds),
    ("forward_backward", "fwd+bwd ms", _milliseconds),
    ("end_to_end", "all ms", _milliseconds),
    ("host", "host us", lambda seconds: f"{seconds * 1e6:.1f}"),
    ("memory_forward", "fwd MiB", _mebibytes),
    ("memory_forward_backward", "fwd+bwd MiB", _mebibytes),
    ("memory_with_mask", "with mask MiB", _mebibytes),
    ("prefill_attention", "prefill, attention ms", _milliseconds),
    ("decode_attention", "decoding, attention ms", _milliseconds),
    ("attention", "attention ms", _milliseconds),
    ("prefill", "prefill ms", _milliseconds),
    ("decode", "decoding ms", _milliseconds),
    ("generate", "all ms", _milliseconds),
    ("memory_generate", "extra MiB", _mebibytes),
)


def to_json(
    environment: dict[str, Any], workloads: Sequence[Workload], records: Sequence[Record]
) -> dict[str, Any]:
    """The whole run as plain values; times in seconds, memory in bytes."""
    cases: dict[str, Any] = {}
    for workload in workloads:
        earlier = cases.get(workload.name, {"contestants": ()})["contestants"]
        cases[workload.name] = {
            **asdict(workload.shape),
            "contestants": [*earlier, *workload.contestants],
            "query_bytes": workload.shape.query_bytes,
        }
    return written(environment, QUANTITIES, cases, records)


def written(
    environment: dict[str, Any],
    quantities: dict[str, str],
    cases: dict[str, Any],
    records: Sequence[Record],
) -> dict[str, Any]:
    """What a file of results holds."""
    return {
        "schema": SCHEMA,
        "environment": environment,
        "quantities": quantities,
        "cases": cases,
        "records": [to_plain(record) for record in records],
        "ratios": ratios(records),
    }


def write_json(path: Path, results: dict[str, Any]) -> None:
    """Write a file of results: an entry of a list or of the cases is a line, to compare by."""
    parts = []
    for name, value in results.items():
        if name in ("cases", "environment", "quantities"):
            lines = [f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items()]
            text = "{\n" + ",\n".join(lines) + "\n }"
        elif isinstance(value, list):
            text = "[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in value) + "\n ]"
        else:
            text = json.dumps(value)
        parts.append(f" {json.dumps(name)}: {text}")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    unfinished.replace(path)  # a run that is killed leaves the last whole file


def records_of(results: dict[str, Any]) -> list[Record]:
    """The records of a JSON file.

    Raises:
        ValueError: it has another schema.
    """
    if results.get("schema") != SCHEMA:
        raise ValueError(f"schema is {results.get('schema')!r}; results have {SCHEMA}")
    return [from_plain(fields) for fields in results["records"]]


def sweep_of(case: str) -> str:
    """The sweep that a case belongs to: its name without the last part."""
    return case.rpartition("-")[0]


def sweeps(results: dict[str, Any]) -> dict[str, list[str]]:
    """Cases that differ in one number, by the name of their sweep."""
    found: dict[str, list[str]] = {}
    for name in results["cases"]:
        found.setdefault(sweep_of(name), []).append(name)
    return {
        sweep: names
        for sweep, names in found.items()
        if len(names) >= _LEAST_OF_A_SWEEP and not sweep.startswith("dense")
    }


def result_tables(results: dict[str, Any]) -> list[Table]:
    """A table for each case, and for each quantity of a sweep."""
    records = records_of(results)
    swept = sweeps(results)
    tables = [
        _case_table(name, case, [record for record in records if record.case == name])
        for name, case in results["cases"].items()
        if name not in swept.get(sweep_of(name), ())
    ]
    for sweep, names in swept.items():
        tables += _sweep_tables(sweep, names, results, [r for r in records if r.case in names])
    return tables


def _case_table(name: str, case: dict[str, Any], records: Sequence[Record]) -> Table:
    measured = {record.quantity for record in records if record.value is not None}
    columns = [column for column in COLUMNS if column[0] in measured]
    found = {(r.contestant, r.quantity): r.value for r in records if r.value is not None}
    masks = {record.contestant: record.mask for record in records}
    rows = tuple(
        (
            contestant,
            masks[contestant],
            *(
                shown(found[contestant, quantity]) if (contestant, quantity) in found else "-"
                for quantity, _, shown in columns
            ),
        )
        for contestant in case["contestants"]
        if contestant in masks
    )
    heads = ("", "attends to", *(head for _, head, _ in columns))
    return Table(f"{name} ({shape_text(case)})", heads, rows, tuple(_notes(records)))


def _sweep_tables(
    sweep: str, names: Sequence[str], results: dict[str, Any], records: Sequence[Record]
) -> list[Table]:
    found = {r.key: r.value for r in records if r.value is not None}
    first = results["cases"][names[0]]
    tables = []
    for quantity, _, shown in COLUMNS:
        contestants = list(
            dict.fromkeys(r.contestant for r in records if r.quantity == quantity and r.value)
        )
        if not contestants:
            continue
        rows = tuple(
            (
                name,
                *(
                    shown(found[name, contestant, quantity])
                    if (name, contestant, quantity) in found
                    else "-"
                    for contestant in contestants
                ),
            )
            for name in names
        )
        unit = "MiB" if quantity.startswith("memory") else "us" if quantity == "host" else "ms"
        about = results["quantities"].get(quantity, quantity)
        title = f"{sweep}: {about}, {unit} (first: {shape_text(first)})"
        tables.append(Table(title, ("", *contestants), rows))
    notes = _sweep_notes(names, records)
    if not tables:
        return [Table(f"{sweep} (first: {shape_text(first)})", ("",), (), notes)]
    last = tables.pop()
    return [*tables, Table(last.title, last.heads, last.rows, notes)]


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


def shape_text(case: dict[str, Any]) -> str:
    """A case in the letters of the field."""
    queries = "" if case["queries"] is None else f" Q{case['queries']}"
    window = "" if case["window"] is None else f" w{case['window']}"
    bias = ", bias per query and key" if case.get("per_query") and case["queries"] is None else ""
    return (
        f"B{case['batch']} H{case['heads']} Hk{case['kv_heads']} D{case['head_dim']}{queries} "
        f"N{case['length']}{window}, {case['dtype']}{', causal' if case['causal'] else ''}{bias}"
    )


def _notes(records: Iterable[Record]) -> Iterable[str]:
    for record in records:
        if record.reason is not None:
            yield f"{record.contestant}, {record.quantity}: {record.reason}"
