# SPDX-License-Identifier: BSD-3-Clause
"""Tables of what profilers and single experiments told, which no command of this program repeats.

A file of ``profiles/`` holds those of a machine: when, of which commit and how they were taken, and
tables with their cells as pages show them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .tables import Table

SCHEMA = 1
PROFILES = Path(__file__).resolve().parent / "profiles"


def profile_tables(folder: Path = PROFILES) -> dict[str, Table]:
    """The tables of all files, by their names, which are those of blocks of pages.

    Raises:
        ValueError: a file is no such file, has another table's name again, or a row with too few or
            too many cells.
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
    """On what and when."""
    commit = f"commit {written['commit'][:7]}" if written["commit"] else "commit not noted"
    versions = f"torch {written['torch']}, cuDNN {written['cudnn']}"
    return f"measured: {written['machine']}, {versions}, {commit}, {written['date']}"
