# SPDX-License-Identifier: BSD-3-Clause
"""Fills the blocks of a Markdown page with the figures and tables of all results in a folder.

The block of ``h200.json`` stands between ``<!-- results: h200 -->`` and ``<!-- end results -->``.
A block without a file says that nothing is there yet; so the page can be renewed at any time.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .bars import bars_of, bars_table, verdicts
from .environment import heading, machine
from .plot import write_plots
from .records import Record, values
from .results import records_of
from .show import read_results, tables_of
from .tables import Table

_BLOCK = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end results -->)", re.DOTALL)
_SUMMARY = "summary"
_ABSENT = "*Not measured yet.*\n"

# Where two numbers of a file are worth a line at the top: file, case, ours, quantity.
_HEADLINES = (
    ("h200", "heads32-8k", "intervals", "forward"),
    ("h200", "heads32-8k", "intervals", "backward"),
    ("h200", "growth-64k", "intervals", "forward"),
    ("h200", "growth-64k", "intervals", "backward"),
    ("h200", "decode-64k", "key_mask", "forward"),
    ("h200-legacy-forward", "length-32768", "boolean", "forward"),
    ("h200-legacy-backward", "length-16384", "boolean", "backward"),
    ("h200-generate", "generate-16k", "flash_dmattn", "attention"),
    ("cpu", "masked-4k", "intervals", "forward"),
    ("cpu", "masked-4k", "intervals", "forward_backward"),
    ("cpu-legacy-forward", "length-4096", "boolean", "forward"),
    ("cpu-legacy-backward", "length-2048", "boolean", "backward"),
    ("cpu-generate", "generate-2k", "flash_dmattn", "attention"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``render``."""
    parser.add_argument("--results", type=Path, default=Path("benchmarks"), help="folder of JSON")
    parser.add_argument("--page", type=Path, default=Path("docs/benchmarks.md"))
    parser.add_argument("--figures", type=Path, default=Path("docs/figures"), help="written here")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 where the page is not so"
    )


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Write the figures and the page; returns the exit status."""
    try:
        page = options.page.read_text()
        files = {name: options.results / f"{name}.json" for _, name, _ in _BLOCK.findall(page)}
        found = {name: read_results(path) for name, path in files.items() if path.exists()}
        if not options.check:
            for name, results in found.items():
                for old in options.figures.glob(f"{name}-*.png"):
                    if _owner(old.stem, files) == name:
                        old.unlink()
                write_plots(results, options.figures, f"{name}-")
        text = rendered(page, found, options.figures)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))
    if text == page:
        return 0
    if options.check:
        print(f"{options.page} is not what {options.results} gives; run render", file=sys.stderr)
        return 1
    options.page.write_text(text)
    return 0


def rendered(page: str, found: dict[str, dict[str, Any]], figures: Path) -> str:
    """The page with its blocks filled."""
    names = [name for _, name, _ in _BLOCK.findall(page)]

    def fill(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name == _SUMMARY:
            body = _summary(found).markdown() + "\n"
        elif name in found:
            pictures = sorted(
                path.name
                for path in figures.glob(f"{name}-*.png")
                if _owner(path.stem, names) == name
            )
            body = _block(name, found[name], [f"{figures.name}/{picture}" for picture in pictures])
        else:
            body = _ABSENT
        return f"{begin}{body}{end}"

    return _BLOCK.sub(fill, page)


def _owner(figure: str, names: Iterable[str]) -> str:
    """The block that a figure belongs to: the longest name that it begins with."""
    return max((name for name in names if figure.startswith(f"{name}-")), key=len, default="")


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


def _summary(found: dict[str, dict[str, Any]]) -> Table:
    """The headlines: ours beside the best with the same mask and the best without any."""
    rows = []
    for file, case, ours, quantity in _HEADLINES:
        if file not in found:
            continue
        records = [r for r in records_of(found[file]) if r.case == case and r.quantity == quantity]
        known = values(records)
        if (case, ours, quantity) not in known:
            continue
        mine = next(r for r in records if r.contestant == ours)
        others = [r for r in records if r.role == "baseline" and r.value is not None]
        cells = []
        for group in (
            [r for r in others if r.mask == mine.mask],
            [r for r in others if r.mask != mine.mask],
        ):
            best = min(group, key=lambda r: r.value or 0, default=None)
            cells.append(_beside(best, mine))
        rows.append(
            (
                f"{machine(found[file]['environment'])}: {case}, {quantity.replace('_', ' + ')}",
                _ms(mine),
                *cells,
            )
        )
    heads = ("", "flash_dmattn", "best with the same mask", "best dense, no mask")
    return Table("At a glance", heads, tuple(rows))


def _ms(record: Record) -> str:
    milliseconds = (record.value or 0) * 1e3
    return f"{milliseconds:.3g} ms" if milliseconds < 1000 else f"{milliseconds:.0f} ms"


def _beside(best: Record | None, mine: Record) -> str:
    if best is None or not best.value or not mine.value:
        return "-"
    return f"{_ms(best)} ({best.contestant}), {best.value / mine.value:.2g} x"
