# SPDX-License-Identifier: BSD-3-Clause
"""Pictures of a run: bars of time for each case, and time against the sequence length."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .records import Record
from .report import records_of

_PASSES = {"forward": "forward", "backward": "backward"}
_COLORS = {"ours": "tab:blue", "baseline": "tab:orange", "information": "tab:gray"}
_GROWTH = "growth-"


def load_pyplot() -> Any:
    """Matplotlib's pyplot, without a screen.

    Raises:
        ModuleNotFoundError: it is not installed; the text says what to install.
    """
    try:
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"plots need matplotlib ({error}); pip install 'flash-dmattn[demo]'"
        ) from None
    pyplot.switch_backend("Agg")
    return pyplot


def write_plots(written: dict[str, Any], folder: Path) -> list[Path]:
    """Write ``bars.png`` and ``growth.png``, as far as the run has numbers for them."""
    pyplot = load_pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    timed = [r for r in records_of(written) if r.value is not None and r.quantity in _PASSES]
    title = f"{written['environment']['gpu'] or written['environment']['cpu']}, bfloat16"
    growth = [r for r in timed if r.case.startswith(_GROWTH)]
    cases = [r for r in timed if not r.case.startswith(_GROWTH)]
    paths = []
    for name, records, draw in (("bars", cases, _draw_bars), ("growth", growth, _draw_growth)):
        if records:
            figure = draw(pyplot, records, written["cases"])
            figure.suptitle(title)
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1], dpi=130)
            pyplot.close(figure)
    return paths


def _draw_bars(pyplot: Any, records: Sequence[Record], shapes: dict[str, Any]) -> Any:
    names = list(dict.fromkeys(record.case for record in records))
    heights = [2 + len({r.contestant for r in records if r.case == name}) for name in names]
    figure, axes = pyplot.subplots(
        len(names),
        len(_PASSES),
        figsize=(11, 0.3 * sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for row, name in zip(axes, names, strict=True):
        for axis, (quantity, title) in zip(row, _PASSES.items(), strict=True):
            shown = [r for r in records if (r.case, r.quantity) == (name, quantity)]
            if not shown:
                axis.set_axis_off()
                continue
            times = [1e3 * (record.value or 0) for record in shown]
            bars = axis.barh(
                [record.contestant for record in shown],
                times,
                color=[_COLORS[record.role] for record in shown],
            )
            axis.bar_label(bars, labels=[f" {time:.3g}" for time in times], fontsize=8)
            axis.set(title=f"{name}, {title}", xlabel="milliseconds")
            axis.margins(x=0.12)
            axis.invert_yaxis()
    return figure


def _draw_growth(pyplot: Any, records: Sequence[Record], shapes: dict[str, Any]) -> Any:
    figure, axes = pyplot.subplots(1, len(_PASSES), figsize=(11, 4.2), layout="constrained")
    for axis, (quantity, title) in zip(axes, _PASSES.items(), strict=True):
        lines: dict[str, dict[int, float]] = {}
        for record in records:
            if record.quantity == quantity:
                length = shapes[record.case]["length"]
                lines.setdefault(record.contestant, {})[length] = 1e3 * (record.value or 0)
        for contestant, line in lines.items():
            ours = contestant == "intervals"
            axis.plot(
                list(line),
                list(line.values()),
                marker="o",
                label=contestant,
                linewidth=2.5 if ours else 1.2,
                linestyle="-" if ours else "--",
            )
        ticks = sorted({length for line in lines.values() for length in line})
        axis.set(title=title, xlabel="sequence length", ylabel="milliseconds")
        axis.set(xscale="log", yscale="log")
        axis.set_xticks(ticks, [str(length) for length in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend()
    return figure
