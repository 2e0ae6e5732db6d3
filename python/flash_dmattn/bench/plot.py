# SPDX-License-Identifier: BSD-3-Clause
"""Pictures of a run, each with one message: who takes how long, and how that grows."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import equivalence
from .environment import machine
from .records import Record
from .results import records_of, shape_text, sweeps

# Sweeps that are drawn: what changes, and how the axis calls it. The others are small: tables do.
_SWEPT = {
    "growth": ("length", "tokens"),
    "length": ("length", "tokens"),
    "window": ("window", "keys that each query keeps"),
    "decode": ("length", "cached keys of one query"),
}
_TIMES = {
    "forward": "forward",
    "backward": "backward",
    "forward_with_mask": "making the mask and forward",
    "end_to_end": "making the mask, forward and backward",
}
# Beside ours, one line or point for each of these is enough in a picture.
_LEFT_OUT = ("sdpa_expanded", "sdpa_gqa", "sdpa_augmented")
_BY_ROLE = {
    "ours": ("tab:blue", "navy", "deepskyblue", "teal"),
    "masked": ("tab:red", "tab:orange", "tab:brown", "tab:pink", "tab:olive", "goldenrod"),
    "unmasked": ("0.2", "0.45", "0.6", "0.7"),
}
_MARKS = {"ours": "osv^", "masked": "DPXd*p", "unmasked": "|x1+"}


def load_pyplot() -> Any:
    """Matplotlib's pyplot, without a screen.

    Raises:
        ModuleNotFoundError: it is not installed; the text says what to install.
    """
    try:
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"plots need matplotlib ({error}); pip install 'flash-dmattn[bench]'"
        ) from None
    pyplot.switch_backend("Agg")
    return pyplot


def write_plots(results: dict[str, Any], folder: Path, prefix: str = "") -> list[Path]:
    """Write a picture for everything that the run has numbers for; returns the files."""
    pyplot = load_pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    where = machine(results["environment"])
    paths = []
    for name, title, figure in _figures(pyplot, results):
        figure.suptitle(f"{title}\n{where}", fontsize=11)
        paths.append(folder / f"{prefix}{name}.png")
        # Without the version of matplotlib in it, so that equal pictures are equal files.
        figure.savefig(paths[-1], dpi=110, metadata={"Software": None})
        pyplot.close(figure)
    return paths


def _figures(pyplot: Any, results: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Name, title and figure of every picture."""
    if equivalence.is_equivalence(results):
        title = "largest error of ours by that of PyTorch in the same 16 bit"
        yield "errors", title, _draw_errors(pyplot, results)
        return
    records = [
        r for r in records_of(results) if r.value is not None and r.contestant not in _LEFT_OUT
    ]
    styles = _styles(records)
    if any(record.quantity == "attention" for record in records):
        yield "attention", "time in attention of a whole generation", _draw_stack(pyplot, records)
        return
    swept = {name for names in sweeps(results).values() for name in names}
    single = [
        r for r in records if r.case not in swept and results["cases"][r.case]["window"] is not None
    ]
    for quantity in ("forward", "backward"):
        points = [r for r in single if r.quantity == quantity]
        if points:
            yield f"times-{quantity}", f"{quantity} time", _draw_points(pyplot, points, styles, 1e3)
    memory = [r for r in single if r.quantity == "memory_with_mask"]
    if memory:
        title = "peak extra memory of making the mask, forward and backward"
        yield "memory", title, _draw_points(pyplot, memory, styles, 1 / (1 << 20))
    for sweep, names in sweeps(results).items():
        if sweep not in _SWEPT:
            continue
        varied, label = _SWEPT[sweep]
        for quantity, title in _TIMES.items():
            lines = [r for r in records if r.case in names and r.quantity == quantity]
            if len({r.contestant for r in lines}) < 2:
                continue
            places = {name: results["cases"][name][varied] for name in names}
            figure = _draw_lines(pyplot, lines, places, styles, label)
            shape = shape_text({**results["cases"][names[-1]], varied: ""})
            yield f"{sweep}-{quantity.replace('_', '-')}", f"{title} by {label} ({shape})", figure


@dataclass(frozen=True)
class _Style:
    """How a contestant looks: blues are ours, greys attend without a mask."""

    color: str
    mark: str
    line: str
    width: float


def _styles(records: Sequence[Record]) -> dict[str, _Style]:
    chosen: dict[str, _Style] = {}
    taken = dict.fromkeys(_BY_ROLE, 0)
    for record in records:
        if record.contestant in chosen:
            continue
        kind = "masked" if "top-w" in record.mask else "unmasked"
        kind = "ours" if record.role == "ours" else kind
        palette, marks = _BY_ROLE[kind], _MARKS[kind]
        chosen[record.contestant] = _Style(
            palette[taken[kind] % len(palette)],
            marks[taken[kind] % len(marks)],
            ":" if kind == "unmasked" else "-",
            2.5 if kind == "ours" else 1.4,
        )
        taken[kind] += 1
    return chosen


def _draw_points(
    pyplot: Any, records: Sequence[Record], styles: dict[str, _Style], scale: float
) -> Any:
    """A row for each case, a point for each contestant on a logarithmic axis."""
    names = list(dict.fromkeys(record.case for record in records))
    figure, axis = pyplot.subplots(figsize=(9, 1.6 + 0.55 * len(names)), layout="constrained")
    for contestant in dict.fromkeys(record.contestant for record in records):
        shown = [r for r in records if r.contestant == contestant]
        axis.scatter(
            [scale * max(record.value or 0, 1e-9) for record in shown],
            [names.index(record.case) for record in shown],
            color=styles[contestant].color,
            marker=styles[contestant].mark,
            s=90,
            alpha=0.75,
            label=contestant,
            zorder=3,
        )
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("milliseconds" if scale == 1e3 else "MiB")
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(alpha=0.3, which="both")
    figure.legend(loc="outside right upper", fontsize=9, frameon=False)
    return figure


def _draw_lines(
    pyplot: Any,
    records: Sequence[Record],
    places: dict[str, int],
    styles: dict[str, _Style],
    label: str,
) -> Any:
    """A line for each contestant with its name at the end, both axes logarithmic."""
    figure, axis = pyplot.subplots(figsize=(8, 4.6), layout="constrained")
    ends: dict[str, tuple[float, float]] = {}
    for contestant in dict.fromkeys(record.contestant for record in records):
        shown = [r for r in records if r.contestant == contestant]
        line = sorted((places[record.case], 1e3 * (record.value or 0)) for record in shown)
        style = styles[contestant]
        axis.plot(
            *zip(*line, strict=True),
            marker="o",
            markersize=4,
            color=style.color,
            linewidth=style.width,
            linestyle=style.line,
        )
        ends[contestant] = line[-1]
    axis.set(xscale="log", yscale="log", xlabel=label, ylabel="milliseconds")
    ticks = sorted({*places.values()})
    axis.set_xticks(ticks, [_short(tick) for tick in ticks])
    axis.set_xticks([], minor=True)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.grid(alpha=0.3)
    low, high = axis.get_ylim()
    for contestant, height in _apart(ends, math.log(high / low) / 22).items():
        axis.annotate(
            contestant,
            xy=ends[contestant],
            xytext=(1.02, height),
            textcoords=axis.get_yaxis_transform(),
            color=styles[contestant].color,
            fontsize=9,
            va="center",
            annotation_clip=False,
        )
    return figure


def _apart(ends: dict[str, tuple[float, float]], least: float) -> dict[str, float]:
    """Heights for names beside the ends of lines, in their order and not on one another."""
    heights: dict[str, float] = {}
    last = -math.inf
    for name, (_, value) in sorted(ends.items(), key=lambda item: item[1][1]):
        last = max(math.log(value), last + least)
        heights[name] = math.exp(last)
    return heights


def _short(count: int) -> str:
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)


def _draw_stack(pyplot: Any, records: Sequence[Record]) -> Any:
    """A bar for each contestant: the prompt, then the tokens."""
    names = list(dict.fromkeys(record.contestant for record in records))
    found = {(r.contestant, r.quantity): 1e3 * (r.value or 0) for r in records}
    figure, axis = pyplot.subplots(figsize=(8, 1.4 + 0.5 * len(names)), layout="constrained")
    prefill = [found[name, "prefill_attention"] for name in names]
    decode = [found[name, "decode_attention"] for name in names]
    axis.barh(names, prefill, color="tab:blue", label="prompt")
    bars = axis.barh(names, decode, left=prefill, color="tab:orange", label="generated tokens")
    # The median of sums, as tables show it, is not the sum of the medians that the bar is made of.
    totals = [f" {found[name, 'attention']:.4g} ms" for name in names]
    axis.bar_label(bars, labels=totals, fontsize=9)
    axis.set_xlabel("milliseconds in attention")
    axis.margins(x=0.15)
    axis.invert_yaxis()
    axis.legend(frameon=False)
    return figure


def _draw_errors(pyplot: Any, results: dict[str, Any]) -> Any:
    """A point for each configuration, by tensor; the bound is a line."""
    figure, axis = pyplot.subplots(figsize=(8, 3.8), layout="constrained")
    found = equivalence.ratios(results)
    for place, tensor in enumerate(equivalence.TENSORS):
        shown = [ratio for (_, _, what), ratio in found.items() if what == tensor]
        # Side by side rather than on one another.
        steps = [place + 0.6 * (i / max(len(shown) - 1, 1) - 0.5) for i in range(len(shown))]
        axis.scatter(steps, shown, s=14, color="tab:blue")
    axis.axhline(equivalence.LIMIT, color="tab:red")
    axis.annotate(
        "largest allowed",
        (0.01, equivalence.LIMIT),
        xycoords=("axes fraction", "data"),
        color="tab:red",
        va="bottom",
        fontsize=9,
    )
    axis.set_xticks(range(len(equivalence.TENSORS)), equivalence.TENSORS)
    axis.set_ylabel("times PyTorch's error")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3, axis="y")
    return figure
