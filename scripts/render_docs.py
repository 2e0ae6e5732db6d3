#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Draws the figures of the documentation, and renews the table of the map in docs/index.md.

The pictures of masks and plans come from the installed package, the map from the files that
"python -m flash_dmattn.bench map --output benchmarks/NAME_map.json" wrote. Needs the extra [bench].
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from docs_lib import masks, plans
from flash_dmattn.bench.map_report import load, markdown, write_figure

ROOT = Path(__file__).resolve().parent.parent
FIGURES, PAGE = ROOT / "docs" / "figures", ROOT / "docs" / "index.md"
BLOCK = re.compile(r"(<!-- map_table -->\n).*?(<!-- end map_table -->)", re.DOTALL)


def map_files() -> list[Path]:
    """The maps that were measured."""
    return sorted((ROOT / "benchmarks").glob("*_map.json"))


def main() -> int:
    """Parse the command line and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="a folder for all, in place of docs/")
    options = parser.parse_args()
    folder = options.output or FIGURES
    try:
        maps = [load(path) for path in map_files()]
    except ValueError as error:
        print(f"render_docs: {error}", file=sys.stderr)
        return 1
    if not maps:
        print("render_docs: there is no benchmarks/*_map.json", file=sys.stderr)
        return 1
    for picture in (*masks.PICTURES, *plans.PICTURES):
        print(picture(folder))
    write_figure(maps, folder / "map.png")
    print(folder / "map.png")
    tables = "\n\n".join(markdown(*one) for one in maps)
    page, found = BLOCK.subn(rf"\g<1>{tables}\n\g<2>", PAGE.read_text())
    if found != 1:
        print(f"render_docs: {PAGE} has no block map_table", file=sys.stderr)
        return 1
    to = PAGE if options.output is None else folder / PAGE.name
    to.write_text(page)
    print(to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
