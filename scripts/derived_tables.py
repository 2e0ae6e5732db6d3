#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Checks that everything derived from cmake/targets.json and the build's options agrees with them.

That is: blocks of pages between <!-- NAME --> and <!-- end NAME -->, conda/variants.yaml, and what
pyproject.toml has to repeat. With --write, files that differ are renewed.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # docs_tools is at the top

from wheels import targets
from wheels.derived import derived_files, disagreements
from wheels.project import ROOT


def main() -> int:
    """Parse the command line, then check or write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="renew the files")
    asked = parser.parse_args()
    table = targets.load()
    problems = list(disagreements(table))
    for problem in problems:
        print(f"derived_tables: {problem}", file=sys.stderr)
    drifted = bool(problems)
    for path, expected in derived_files(table):
        present = path.read_text(encoding="utf-8") if path.exists() else ""
        if present == expected:
            continue
        name = path.relative_to(ROOT)
        if asked.write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(expected, encoding="utf-8")
            print(f"derived_tables: wrote {name}")
            continue
        drifted = True
        sys.stdout.writelines(
            difflib.unified_diff(
                present.splitlines(keepends=True),
                expected.splitlines(keepends=True),
                str(name),
                "what the table gives",
            )
        )
    if drifted:
        print("derived_tables: run scripts/derived_tables.py --write", file=sys.stderr)
    return int(drifted)


if __name__ == "__main__":
    sys.exit(main())
