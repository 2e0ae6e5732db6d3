# SPDX-License-Identifier: BSD-3-Clause
"""Command line of the benchmarks: ``python -m flash_dmattn.bench forward --output forward.json``.

Without a subcommand every quantity of the standard cases is measured, on a GPU where there is one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

_NEEDED = "the benchmarks need {}; pip install 'flash-dmattn[bench]'"

try:
    from . import equivalence, generate, map_report, peak, render, show
    from . import map as density_map
    from .measure import VIEWS
except ModuleNotFoundError as missing:
    if missing.name not in ("tabulate", "torch", "tqdm"):
        raise
    sys.exit(_NEEDED.format(missing.name))


class Implementation(Protocol):
    """What a module or a view has that is a subcommand."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace, parser: argparse.ArgumentParser) -> int: ...


@dataclass(frozen=True)
class Command:
    """A subcommand: one line of help, and who adds its options and runs it."""

    about: str
    implementation: Implementation


COMMANDS: dict[str, Command] = {
    **{name: Command(view.about, view) for name, view in VIEWS.items()},
    "equivalence": Command("errors beside PyTorch's at the shapes of 1.2.2's scripts", equivalence),
    "generate": Command("time in attention of a language model that generates", generate),
    "map": Command("over lengths and shares of kept keys, beside dense attention", density_map),
    "map-show": Command("maps as tables and as a figure", map_report),
    "show": Command("tables, bars and plots of results", show),
    "render": Command("figures and tables of a page from all results in a folder", render),
    "peak": Command("peak extra memory of one call, in bytes; for the other commands", peak),
}
_DEFAULT = "all"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m flash_dmattn.bench", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.about, description=command.about)
        command.implementation.add_arguments(subparser)
        subparser.set_defaults(run=command.implementation.run, parser=subparser)
    options = parser.parse_args(_with_command(sys.argv[1:] if arguments is None else arguments))
    status: int = options.run(options, options.parser)
    return status


def _with_command(arguments: Sequence[str]) -> list[str]:
    """The arguments with a subcommand, should they begin with an option."""
    if arguments and (arguments[0] in ("-h", "--help") or not arguments[0].startswith("-")):
        return list(arguments)
    return [_DEFAULT, *arguments]


if __name__ == "__main__":
    sys.exit(main())
