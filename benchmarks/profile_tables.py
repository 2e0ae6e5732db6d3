# SPDX-License-Identifier: BSD-3-Clause
"""Tables of profiler results and single experiments, which no command of this program repeats.

A file of ``profiles/`` has those of one machine: when, at which commit and how they were taken, and
tables with their cells as shown on pages.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .tables import Table

SCHEMA = 1
PROFILES = Path(__file__).resolve().parent / "profiles"


def profile_tables(folder: Path = PROFILES) -> dict[str, Table]:
    """Return the tables of all files by name; the names are those of blocks of pages.

    Raises:
        ValueError: a file has another format, repeats another table's name, or has a row with too
            few or too many cells.
    """
    found: dict[str, Table] = {}
    for path in sorted(folder.glob("*.json")):
        written = json.loads(path.read_text())
        if written.get("schema") != SCHEMA:
            raise ValueError(f"{path}: schema is {written.get('schema')!r}; profiles have {SCHEMA}")
        for name, table in written["tables"].items():
            if name in found:
                raise ValueError(f"{path}: another file has a table {name!r}, too")
            found[name] = _table(f"{path}: {name}", table, _taken(written))
    return found


def _table(place: str, written: dict[str, Any], taken: str) -> Table:
    heads, rows = tuple(written["columns"]), tuple(map(tuple, written["rows"]))
    if any(len(row) != len(heads) for row in rows):
        raise ValueError(f"{place}: every row must have {len(heads)} cells")
    return Table(written["title"], heads, rows, (*written["notes"], taken))


def _taken(written: dict[str, Any]) -> str:
    """Return machine, versions, commit and date."""
    commit = f"commit {written['commit'][:7]}" if written["commit"] else "commit not noted"
    versions = f"torch {written['torch']}, cuDNN {written['cudnn']}"
    return f"measured: {written['machine']}, {versions}, {commit}, {written['date']}"
