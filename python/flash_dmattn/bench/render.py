# SPDX-License-Identifier: BSD-3-Clause
"""Fills the blocks of Markdown pages with the figures and tables of all results in a folder.

The block of ``h200.json`` stands between ``<!-- results: h200 -->`` and ``<!-- end results -->``;
those of ``headlines.py`` are made of several files. A block without a file says that nothing is
there yet; so pages can be renewed at any time.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .bars import bars_of, bars_table, verdicts
from .environment import heading
from .headlines import HEADLINES, headlines
from .plot import write_plots
from .results import records_of
from .show import read_results, tables_of

_BLOCK = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end results -->)", re.DOTALL)
_ABSENT = "*Not measured yet.*\n"

_PAGES = (Path("docs/benchmarks.md"), Path("README.md"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``render``."""
    parser.add_argument("--results", type=Path, default=Path("benchmarks"), help="folder of JSON")
    parser.add_argument("--page", type=Path, nargs="+", default=_PAGES, metavar="PAGE")
    parser.add_argument("--figures", type=Path, default=Path("docs/figures"), help="written here")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 where a page is not so"
    )


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Write the figures and the pages; returns the exit status."""
    try:
        pages = {path: path.read_text() for path in options.page}
        names = {name for text in pages.values() for _, name, _ in _BLOCK.findall(text)}
        paths = {name: options.results / f"{name}.json" for name in _files(names)}
        found = {name: read_results(path) for name, path in paths.items() if path.exists()}
        if not options.check:
            for name in sorted(names & found.keys()):
                for old in _pictures(options.figures, name, names):
                    old.unlink()
                write_plots(found[name], options.figures, f"{name}-")
        renewed = {
            path: rendered(text, found, options.figures, path.parent)
            for path, text in pages.items()
        }
    except (OSError, ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))
    stale = [path for path, text in renewed.items() if text != pages[path]]
    for path in stale:
        if options.check:
            print(f"{path} is not what {options.results} gives; run render", file=sys.stderr)
        else:
            path.write_text(renewed[path])
    return int(options.check and bool(stale))


def rendered(page: str, found: Mapping[str, dict[str, Any]], figures: Path, folder: Path) -> str:
    """The text of a page in a folder, with its blocks filled."""
    names = [name for _, name, _ in _BLOCK.findall(page)]

    def fill(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if found.keys().isdisjoint(_files([name])):
            body = _ABSENT
        elif name in HEADLINES:
            body = headlines(name, found).markdown() + "\n"
        else:
            pictures = _pictures(figures, name, names)
            body = _block(name, found[name], [os.path.relpath(path, folder) for path in pictures])
        return f"{begin}{body}{end}"

    return _BLOCK.sub(fill, page)


def _files(blocks: Iterable[str]) -> set[str]:
    """The names of the results that blocks are made of."""
    return {
        name
        for block in blocks
        for name in ([line.file for line in HEADLINES[block]] if block in HEADLINES else [block])
    }


def _pictures(figures: Path, block: str, blocks: Iterable[str]) -> list[Path]:
    """The figures of a block: those whose name begins with its own, and with no longer one."""

    def owner(picture: Path) -> str:
        return max((b for b in blocks if picture.name.startswith(f"{b}-")), key=len, default="")

    return sorted(path for path in figures.glob(f"{block}-*.png") if owner(path) == block)


def _block(name: str, results: dict[str, Any], pictures: Sequence[str]) -> str:
    tables = tables_of(results)
    found = verdicts(records_of(results), bars_of(results))
    if any(verdict.met is not None for verdict in found):
        tables.append(bars_table(found))
    text = "\n\n".join(table.markdown() for table in tables)
    shown = "".join(f"![{_caption(picture, name)}]({picture})\n\n" for picture in pictures)
    about = heading(results["environment"]).replace("\n", "  \n")
    return (
        f"{about}\n\n{shown}"
        f'<details markdown="1"><summary>All numbers ({name}.json)</summary>\n\n'
        f"{text}\n\n</details>\n"
    )


def _caption(picture: str, name: str) -> str:
    return Path(picture).stem.removeprefix(f"{name}-").replace("-", ", ", 1).replace("-", " ")
