# SPDX-License-Identifier: BSD-3-Clause
"""Shows results: tables, how they stand against the bars, and plots."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from . import equivalence
from .bars import bars_of, bars_table, verdicts
from .environment import heading
from .plot import write_plots
from .results import records_of, result_tables
from .tables import Table


def add_presentation(parser: argparse.ArgumentParser) -> None:
    """Options of everything that shows results."""
    parser.add_argument(
        "--bars", action="store_true", help="also show what the kernels are held to"
    )
    parser.add_argument("--check", action="store_true", help="exit with 2 when a bar is missed")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write plots here")
    parser.add_argument("--markdown", action="store_true", help="tables as Markdown")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``show``."""
    parser.add_argument("results", type=Path, help="the JSON that --output wrote")
    add_presentation(parser)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Show a file of results; returns the exit status."""
    try:
        return present(read_results(options.results), options)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        parser.error(f"{options.results}: {error}")


def read_results(path: Path) -> dict[str, Any]:
    """The content of a file of results.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file.
    """
    results: dict[str, Any] = json.loads(path.read_text())
    records_of(results)
    return results


def tables_of(results: dict[str, Any]) -> list[Table]:
    """Everything that was measured."""
    if equivalence.is_equivalence(results):
        return equivalence.tables(results)
    return result_tables(results)


def present(results: dict[str, Any], options: argparse.Namespace) -> int:
    """Print tables and write plots; returns 2 for a missed bar that is to be checked."""
    tables = tables_of(results)
    found = verdicts(records_of(results), bars_of(results))
    if options.bars:
        tables.append(bars_table(found))
    shown = [table.markdown() if options.markdown else table.text() for table in tables]
    print("\n\n".join([heading(results["environment"]), *shown]))
    if options.plot is not None:
        for path in write_plots(results, options.plot):
            print(f"wrote {path}", file=sys.stderr)
    return 2 if options.check and any(verdict.met is False for verdict in found) else 0
