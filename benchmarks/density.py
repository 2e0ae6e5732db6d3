# SPDX-License-Identifier: BSD-3-Clause
"""Where dynamic mask attention beats dense attention: the set "map" as a table and a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .results import Results
from .tables import Table

# By the title of the pass: ours including the mask, and dense without one.
_PASSES = {
    "forward": ("forward_with_mask", "forward"),
    "forward and backward": ("end_to_end", "forward_backward"),
}
# The color scale ends at 16 times slower or faster.
_MOST = 4.0


class Cell(NamedTuple):
    """One point of the map; dense attention is the fastest that runs."""

    length: int
    one_in: int
    title: str
    speedup: float
    dense: str


def is_map(results: Results) -> bool:
    """Whether a run is of the set "map"."""
    return bool(results.cases) and all(name.startswith("map-") for name in results.cases)


def cells(results: Results) -> list[Cell]:
    """Return the measured points, by length, then share."""
    known, found = results.values, []
    for case in results.cases:
        _, length, share = case.split("-")
        for title, (ours, theirs) in _PASSES.items():
            times = _of(known, f"map-{length}-dense", theirs)
            mine = _of(known, case, ours)
            if times and mine:
                best = min(times, key=times.__getitem__)
                speedup = times[best] / min(mine.values())
                found.append(Cell(int(length), int(share), title, speedup, best))
    return sorted(found, key=lambda cell: cell[:2])


def _of(known: Mapping[tuple[str, str, str], float], case: str, quantity: str) -> dict[str, float]:
    """Return the numbers of a case by contestant."""
    return {who: v for (name, who, what), v in known.items() if (name, what) == (case, quantity)}


def subject(results: Results) -> str:
    """Return the measured problem and machine in one line."""
    shape = next(iter(results.cases.values()))
    heads = f"{shape['heads']} heads on {shape['kv_heads']} of {shape['head_dim']}"
    batch = f", batch of {shape['batch']}" if shape["batch"] > 1 else ""
    return f"{results.machine}, {shape['dtype']}, {heads}{batch}, causal"


def map_table(results: Results) -> Table:
    """Return the speedups over dense attention: forward / forward and backward."""
    found = cells(results)
    at = {(cell.length, cell.one_in, cell.title): cell.speedup for cell in found}
    shares = sorted({cell.one_in for cell in found})
    rows = []
    for length in dict.fromkeys(cell.length for cell in found):
        both = {share: [at.get((length, share, title)) for title in _PASSES] for share in shares}
        pairs = (" / ".join(map(_times, pair)) for pair in both.values())
        rows.append((str(length), _pays_from(both), *pairs))
    where = results.environment
    dense = " or ".join(dict.fromkeys(cell.dense for cell in found))
    notes = (
        "times faster than dense attention, forward / forward and backward, by the share of the "
        "keys that is kept",
        f"dense attention is {dense}, the fastest at each length; torch {where['torch']}, "
        f"{where['date'][:10]}; medians of {where['measurement']}",
    )
    heads = ("tokens", "pays from", *map(_share, shares))
    return Table(subject(results), heads, tuple(rows), notes)


def dense_table(maps: Sequence[Results]) -> Table:
    """Return the share from which each length pays, and the least speedup of each pass."""
    columns = [{cell.length: "" for cell in cells(results)} for results in maps]
    for results, column in zip(maps, columns, strict=True):
        for length in column:
            found = [cell for cell in cells(results) if cell.length == length]
            at = {(cell.one_in, cell.title): cell.speedup for cell in found}
            shares = {cell.one_in for cell in found}
            both = {share: [at.get((share, title)) for title in _PASSES] for share in shares}
            speedups = ([cell.speedup for cell in found if cell.title == p] for p in _PASSES)
            least = (_times(min(known, default=None)) for known in speedups)
            column[length] = f"{_pays_from(both)}; {' / '.join(least)}"
    lengths = sorted({length for column in columns for length in column})
    rows = [(str(length), *(column.get(length, "") for column in columns)) for length in lengths]
    title = "Largest share of keys that pays; least speedup, forward / forward and backward"
    measured = "; ".join(dict.fromkeys(results.commit for results in maps))
    heads = ("tokens", *(subject(results).removesuffix(", causal") for results in maps))
    return Table(title, heads, tuple(rows), (f"measured: {measured}",))


def draw_maps(pyplot: Any, maps: Sequence[Results]) -> Any:
    """Return a figure of the maps, one below the other."""
    heights = [len({cell.one_in for cell in cells(results)}) + 2.2 for results in maps]
    figure, axes = pyplot.subplots(
        len(maps),
        len(_PASSES),
        figsize=(12, 0.42 * sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    image = None
    for row, results in zip(axes, maps, strict=True):
        for axis, title in zip(row, _PASSES, strict=True):
            image = _draw(axis, [cell for cell in cells(results) if cell.title == title])
            axis.set_title(f"{title}: {subject(results)}", fontsize=8)
    bar = figure.colorbar(image, ax=axes, shrink=0.9, pad=0.01)
    powers = range(int(-_MOST), int(_MOST) + 1)
    bar.set_ticks(list(powers), labels=[f"{2**p}x" if p >= 0 else f"1/{2**-p}" for p in powers])
    bar.set_label("time of dense attention / ours; blue: ours is faster", fontsize=9)
    return figure


def _draw(axis: Any, found: Sequence[Cell]) -> Any:
    lengths, shares = (sorted({getattr(c, name) for c in found}) for name in ("length", "one_in"))
    powers = [[math.nan] * len(lengths) for _ in shares]
    for cell in found:
        x, y = lengths.index(cell.length), shares.index(cell.one_in)
        powers[y][x] = math.log2(cell.speedup)
        axis.text(
            x,
            y,
            f"{_times(cell.speedup)}\nw = {max(1, cell.length // cell.one_in)}",
            ha="center",
            va="center",
            fontsize=6.5,
            weight="bold" if cell.speedup >= 1 else "normal",
            color="white" if abs(powers[y][x]) > 0.7 * _MOST else "black",
        )
    image = axis.imshow(powers, cmap="RdBu", vmin=-_MOST, vmax=_MOST, aspect="auto")
    axis.set_xticks(range(len(lengths)), [str(length) for length in lengths], fontsize=8)
    axis.set_yticks(range(len(shares)), [_share(share) for share in shares], fontsize=8)
    axis.set_xlabel("tokens", fontsize=8)
    axis.set_ylabel("share of the keys that is kept", fontsize=8)
    return image


def _pays_from(both: dict[int, list[float | None]]) -> str:
    """Return the largest share from which on, downwards, no pass is slower than dense attention."""
    found = "-"
    for share in sorted(both, reverse=True):
        if any(speedup is None or speedup < 1 for speedup in both[share]):
            break
        found = _share(share)
    return found


def _share(one_in: int) -> str:
    return "all" if one_in == 1 else f"1/{one_in}"


def _times(speedup: float | None) -> str:
    if speedup is None:
        return "-"
    return f"{speedup:.0f}x" if speedup >= 9.95 else f"{speedup:.2g}x"
