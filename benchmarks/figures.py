# SPDX-License-Identifier: BSD-3-Clause
"""Figures of a run, each with one message: the time of each contestant, and its growth."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .cases import shape_text
from .density import draw_maps, is_map
from .results import Record, Results
from .tables import COLUMNS

# Sweeps with a figure: the varied field, and the axis label. Small sweeps have only tables.
_SWEPT = {
    "growth": ("length", "tokens"),
    "length": ("length", "tokens"),
    "window": ("window", "keys that each query keeps"),
    "decode": ("length", "cached keys of one query"),
}
_TIMES = ("forward", "backward", "forward_with_mask", "end_to_end")
# Figures omit these, because one line or point for each kind of contestant is enough.
_LEFT_OUT = ("sdpa_expanded", "sdpa_gqa", "sdpa_augmented")
# Colors, marks and lines: blues are ours, greys and dotted lines attend without a mask.
_STYLES = {
    "ours": (("tab:blue", "navy", "deepskyblue", "teal"), "osv^", "-"),
    "masked": (("tab:red", "tab:orange", "tab:brown", "tab:pink", "tab:olive"), "DPXd*", "-"),
    "unmasked": (("0.2", "0.45", "0.6", "0.7"), "|x1+", ":"),
}

Drawing = tuple[str, Callable[[Any], Any]]  # a title, and a function that draws with pyplot
Styles = dict[str, tuple[str, str, str]]  # color, mark and line of each contestant


def load_pyplot() -> Any:
    """Return Matplotlib's pyplot, without a display."""
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    return pyplot


def write_figures(drawings: dict[str, Drawing], folder: Path) -> list[Path]:
    """Draw the figures, and return the files."""
    pyplot = load_pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    for name, (title, draw) in drawings.items():
        figure = draw(pyplot)
        figure.suptitle(title, fontsize=9)
        _save(figure, folder / f"{name}.png")
        pyplot.close(figure)
    return [folder / f"{name}.png" for name in drawings]


def _save(figure: Any, path: Path) -> None:
    """Save with a palette: otherwise antialiased edges make up most of the bytes."""
    pictures: Any = importlib.import_module("PIL.Image")  # matplotlib needs it anyway
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=90, format="png")
    # This method of Pillow keeps rare colors.
    small = pictures.open(drawn).convert("RGB").quantize(256, pictures.Quantize.MAXCOVERAGE)
    small.save(path, format="PNG", optimize=True)


def drawings(results: Results) -> dict[str, Drawing]:
    """Return a figure for everything that the run has numbers for, by name."""
    if is_map(results):
        return {"map": ("", lambda pyplot: draw_maps(pyplot, [results]))}
    found: dict[str, Drawing] = {}
    records = [r for r in results.records if r.value and r.contestant not in _LEFT_OUT]
    styles = _styles(records)
    swept = {name for names in results.sweeps.values() for name in names}
    for what in ("forward", "backward", "memory_with_mask"):
        single = [r for r in records if r.quantity == what and r.case not in swept]
        points = [r for r in single if results.cases[r.case]["window"]]
        if points:
            name = "memory" if "memory" in what else f"times-{what}"
            title = f"{COLUMNS[what].about}\n{results.machine}"
            found[name] = (title, partial(_draw_points, records=points, styles=styles))
    for sweep, names in results.sweeps.items():
        for what in _TIMES if sweep in _SWEPT else ():
            lines = [r for r in records if r.case in names and r.quantity == what]
            if len({r.contestant for r in lines}) < 2:
                continue
            varied, label = _SWEPT[sweep]
            places = {name: results.cases[name][varied] for name in names}
            shape = shape_text({**results.cases[names[-1]], varied: ""})
            title = f"{COLUMNS[what].about} by {label}\n{shape}\n{results.machine}"
            draw = partial(_draw_lines, records=lines, styles=styles, places=places, label=label)
            found[f"{sweep}-{what.replace('_', '-')}"] = (title, draw)
    return found


def _styles(records: Sequence[Record]) -> Styles:
    """Return a style for each contestant, the same in all figures of a run."""
    chosen: Styles = {}
    taken = dict.fromkeys(_STYLES, 0)
    for record in records:
        if record.contestant not in chosen:
            kind = "masked" if "top-w" in record.mask else "unmasked"
            kind = "ours" if record.role == "ours" else kind
            colors, marks, line = _STYLES[kind]
            place = taken[kind] % len(colors)
            chosen[record.contestant] = (colors[place], marks[place], line)
            taken[kind] += 1
    return chosen


def _by_contestant(records: Sequence[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.contestant, []).append(record)
    return found


def _draw_points(pyplot: Any, records: Sequence[Record], styles: Styles) -> Any:
    """Draw a row for each case, and a point for each contestant on a logarithmic axis."""
    names = list(dict.fromkeys(record.case for record in records))
    quantity = COLUMNS[records[0].quantity]
    figure, axis = pyplot.subplots(figsize=(9, 1.6 + 0.55 * len(names)), layout="constrained")
    for contestant, shown in _by_contestant(records).items():
        color, mark, _ = styles[contestant]
        look = {"color": color, "marker": mark, "s": 90, "alpha": 0.75, "zorder": 3}
        values = [(record.value or 0.0) / quantity.scale for record in shown]
        axis.scatter(values, [names.index(r.case) for r in shown], label=contestant, **look)
    axis.set(xscale="log", xlabel=quantity.unit, ylim=(len(names) - 0.5, -0.5))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_yticks(range(len(names)), names)
    axis.grid(alpha=0.3, which="both")
    figure.legend(loc="outside right upper", fontsize=9, frameon=False)
    return figure


def _draw_lines(
    pyplot: Any, records: Sequence[Record], styles: Styles, places: dict[str, int], label: str
) -> Any:
    """Draw a line for each contestant, with both axes logarithmic."""
    figure, axis = pyplot.subplots(figsize=(8, 4.6), layout="constrained")
    for contestant, shown in _by_contestant(records).items():
        line = sorted((places[record.case], 1e3 * (record.value or 0)) for record in shown)
        color, mark, style = styles[contestant]
        axis.plot(*zip(*line, strict=True), color=color, marker=mark, ls=style, label=contestant)
    axis.set(xscale="log", yscale="log", xlabel=label, ylabel="ms")
    ticks = sorted({*places.values()})
    axis.set_xticks(ticks, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in ticks])
    axis.set_xticks([], minor=True)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=9, frameon=False)
    return figure
