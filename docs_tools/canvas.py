# SPDX-License-Identifier: BSD-3-Clause
"""The common parts of the pictures: colors, and masks as squares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
from matplotlib import pyplot
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

pyplot.switch_backend("Agg")

KEPT, SEEN, UNSEEN = "#1f5fa8", "#cfe0f2", "#f4f4f4"
FULL, PARTIAL = KEPT, "#e8883a"
DOTS_PER_INCH = 110


def draw_classes(axis: Any, classes: numpy.ndarray, colors: list[str]) -> None:
    """Draw a (queries, keys) array of color indices as squares, the first query on top."""
    rows, columns = classes.shape
    axis.pcolormesh(
        numpy.arange(columns + 1),
        numpy.arange(rows + 1),
        classes,
        cmap=ListedColormap(colors),
        vmin=-0.5,
        vmax=len(colors) - 0.5,
        edgecolors="white",
        linewidth=0.4,
    )
    axis.set(xlim=(0, columns), ylim=(rows, 0))
    axis.set_aspect("equal")
    for ticks in (axis.xaxis, axis.yaxis):
        ticks.set_major_locator(MaxNLocator(5, integer=True))
    axis.tick_params(labelsize=7, length=2)
    axis.set_xlabel("key j", fontsize=8)
    axis.set_ylabel("query i", fontsize=8)


def draw_mask(axis: Any, kept: Any, title: str, seen: Any = None) -> None:
    """Draw a boolean (queries, keys) tensor; ``seen`` marks the visible keys."""
    kept = numpy.asarray(kept, dtype=bool)
    seen = numpy.zeros_like(kept) if seen is None else numpy.asarray(seen, dtype=bool)
    draw_classes(axis, numpy.where(kept, 2, numpy.where(seen, 1, 0)), [UNSEEN, SEEN, KEPT])
    axis.set_title(title, fontsize=8.5)


def legend(figure: Any, entries: dict[str, str]) -> None:
    """Name colors below the figure."""
    figure.legend(
        handles=[Patch(facecolor=color, label=label) for label, color in entries.items()],
        loc="outside lower center",
        ncols=len(entries),
        frameon=False,
        fontsize=8.5,
    )


def save(figure: Any, path: Path) -> Path:
    """Write a PNG without the metadata that names matplotlib's version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DOTS_PER_INCH, bbox_inches="tight", metadata={"Software": None})
    pyplot.close(figure)
    return path
