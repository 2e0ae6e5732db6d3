# SPDX-License-Identifier: BSD-3-Clause
"""Maps of density and length as they are stored, as tables, and as a figure."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

from .cases import PASSES, Pass
from .plot import load_pyplot
from .tables import Table

SCHEMA = 1
KIND = "map of density and length"
Map = tuple[dict[str, Any], list["Cell"]]

_TITLES: dict[Pass, str] = {"forward": "forward", "forward_backward": "forward and backward"}
# Colors end here: 16 times slower or faster.
_MOST = 4.0


@dataclass(frozen=True)
class Cell:
    """One place of the map: median seconds of a pass over so many tokens, ``window`` kept."""

    length: int
    window: int
    one_in: int
    which: Pass
    ours_s: float
    dense_s: float
    dense: str

    @property
    def speedup(self) -> float:
        """How many times faster than dense attention."""
        return self.dense_s / self.ours_s


def load(path: Path) -> tuple[dict[str, Any], list[Cell]]:
    """Read what ``map --output`` wrote.

    Raises:
        ValueError: the file is something else, or incomplete; the text tells what.
        OSError: it cannot be read.
    """
    try:
        written = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(written, dict) or written.get("kind") != KIND:
        raise ValueError(f"{path} is not a map; 'map --output {path}' writes one")
    if written.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {written.get('schema')!r}, not {SCHEMA}")
    names = {field.name for field in fields(Cell)}
    cells = written.get("cells")
    if not cells or any(set(cell) != names for cell in cells):
        raise ValueError(f"{path} must have cells, each with {', '.join(sorted(names))}")
    found = [Cell(**cell) for cell in cells]
    places = {(cell.length, cell.one_in, cell.which) for cell in found}
    lengths, shares = {length for length, _, _ in places}, {one_in for _, one_in, _ in places}
    if places != set(product(lengths, shares, PASSES)) or len(places) != len(found):
        raise ValueError(f"{path} must have each length with each share, in both passes, once")
    return written, found


def subject(written: dict[str, Any]) -> str:
    """What was measured on what, in one line."""
    environment, shape = written["environment"], written["shape"]
    threads = environment["threads"]
    cores = "one thread" if threads == 1 else f"{threads} threads"
    where = environment["gpu"] or f"{environment['cpu']}, {cores}"
    return (
        f"{where}, {shape['dtype']}, {shape['heads']} heads on {shape['kv_heads']} of "
        f"{shape['head_dim']}, causal"
    )


def table(written: dict[str, Any], cells: Sequence[Cell]) -> Table:
    """How many times faster than dense attention: forward / forward and backward."""
    speedups = {(c.length, c.one_in, c.which): c.speedup for c in cells}
    one_in = sorted({c.one_in for c in cells})
    rows = []
    for length in sorted({c.length for c in cells}):
        pairs = [
            " / ".join(_times(speedups[length, share, which]) for which in PASSES)
            for share in one_in
        ]
        rows.append((str(length), _pays_from(cells, length), *pairs))
    dense = " or ".join(dict.fromkeys(c.dense for c in cells))
    return Table(
        subject(written),
        ("tokens", "pays from", *map(_share, one_in)),
        tuple(rows),
        (
            "times faster than dense attention, forward / forward and backward, by the share of "
            "the keys that is kept",
            f"dense attention is {dense}, the fastest at each length; "
            f"torch {written['environment']['torch']}, {written['environment']['date'][:10]}; "
            f"medians of {written['environment']['measurement']}",
        ),
    )


def text(written: dict[str, Any], cells: Sequence[Cell]) -> str:
    """The table for a terminal."""
    return table(written, cells).text()


def markdown(written: dict[str, Any], cells: Sequence[Cell]) -> str:
    """The table for a page."""
    return table(written, cells).markdown()


def write_figure(maps: Sequence[Map], path: Path) -> None:
    """Write the maps as a figure, one below the other."""
    pyplot = load_pyplot()
    heights = [len({c.one_in for c in cells}) + 2.2 for _, cells in maps]
    figure, axes = pyplot.subplots(
        len(maps),
        len(PASSES),
        figsize=(12, 0.42 * sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    image = None
    for row, (written, cells) in zip(axes, maps, strict=True):
        for axis, which in zip(row, PASSES, strict=True):
            image = _draw(axis, [c for c in cells if c.which == which])
            axis.set_title(f"{_TITLES[which]}: {subject(written)}", fontsize=8)
    bar = figure.colorbar(image, ax=axes, shrink=0.9, pad=0.01)
    powers = range(int(-_MOST), int(_MOST) + 1)
    bar.set_ticks(list(powers), labels=[f"{2**p}x" if p >= 0 else f"1/{2**-p}" for p in powers])
    bar.set_label("time of dense attention / ours; blue: ours is faster", fontsize=9)
    _write_small_png(figure, path)
    pyplot.close(figure)


def _write_small_png(figure: Any, path: Path) -> None:
    """With a palette: the smoothed edges of so many numbers are most of the bytes otherwise."""
    pictures: Any = importlib.import_module("PIL.Image")  # matplotlib needs it anyway
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100, format="png")
    # Of Pillow's ways to choose colors that which keeps rare ones: the red of slower places.
    small = pictures.open(drawn).convert("RGB").quantize(256, pictures.Quantize.MAXCOVERAGE)
    small.save(path, format="PNG", optimize=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``map-show``."""
    parser.add_argument("maps", type=Path, nargs="+", help="what map --output wrote, in order")
    parser.add_argument("--markdown", action="store_true", help="tables as Markdown")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the figure here")


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Show maps; returns the exit status."""
    try:
        maps = [load(path) for path in options.maps]
        render = markdown if options.markdown else text
        print("\n\n".join(render(written, cells) for written, cells in maps))
        if options.plot is not None:
            write_figure(maps, options.plot)
            print(f"wrote {options.plot}", file=sys.stderr)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))
    return 0


def _draw(axis: Any, cells: Sequence[Cell]) -> Any:
    lengths, shares = sorted({c.length for c in cells}), sorted({c.one_in for c in cells})
    powers = [[math.nan] * len(lengths) for _ in shares]
    for cell in cells:
        x, y = lengths.index(cell.length), shares.index(cell.one_in)
        powers[y][x] = math.log2(cell.speedup)
        strong = abs(powers[y][x]) > 0.7 * _MOST
        axis.text(
            x,
            y,
            f"{_times(cell.speedup)}\nw = {cell.window}",
            ha="center",
            va="center",
            fontsize=6.5,
            weight="bold" if cell.speedup >= 1 else "normal",
            color="white" if strong else "black",
        )
    image = axis.imshow(powers, cmap="RdBu", vmin=-_MOST, vmax=_MOST, aspect="auto")
    axis.set_xticks(range(len(lengths)), [str(length) for length in lengths], fontsize=8)
    axis.set_yticks(range(len(shares)), [_share(share) for share in shares], fontsize=8)
    axis.set_xlabel("tokens", fontsize=8)
    axis.set_ylabel("share of the keys that is kept", fontsize=8)
    return image


def _pays_from(cells: Sequence[Cell], length: int) -> str:
    """The largest share from which on, downwards, no pass is slower than dense attention."""
    found = None
    here = [c for c in cells if c.length == length]
    for share in sorted({c.one_in for c in here}, reverse=True):
        if any(c.speedup < 1 for c in here if c.one_in == share):
            break
        found = share
    return "-" if found is None else _share(found)


def _share(one_in: int) -> str:
    return "all" if one_in == 1 else f"1/{one_in}"


def _times(speedup: float) -> str:
    return f"{speedup:.0f}x" if speedup >= 9.95 else f"{speedup:.2g}x"
