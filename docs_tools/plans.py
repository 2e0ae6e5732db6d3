# SPDX-License-Identifier: BSD-3-Clause
"""Pictures of column plans: the columns of tiles, their counts, and the order of keys."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy
from matplotlib import pyplot

from flash_dmattn import IntervalMask, dynamic_mask

from .canvas import FULL, PARTIAL, UNSEEN, draw_classes, legend, save
from .masks import random_bias

# Constants of GPU packs: kTileRows of plan.cuh; kBucketKeys and kChunkKeys of the backward pass.
TILE_ROWS, BUCKET_KEYS, CHUNK_KEYS, BLOCK_KEYS = 128, 2048, 256, 128


class Intervals(NamedTuple):
    """The first row that keeps each key of one head, and the end of these rows."""

    start: numpy.ndarray
    end: numpy.ndarray

    @classmethod
    def of_selection(cls, length: int, window: int) -> Intervals:
        """Return the intervals of a causal selection of `window` keys by random biases."""
        mask = dynamic_mask(random_bias(length), window, is_causal=True)
        assert isinstance(mask, IntervalMask)
        return cls(mask.start[0, 0].numpy(), mask.end[0, 0].numpy())

    def columns(self, first: int, past: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Return the full and the partial columns of the tile of rows [first, past)."""
        full = (self.start <= first) & (self.end >= past)
        touched = numpy.maximum(self.start, first) < numpy.minimum(self.end, past)
        return numpy.flatnonzero(full), numpy.flatnonzero(touched & ~full)


def columns(folder: Path) -> Path:
    """Draw a mask with its tiles, and beside it the columns that the kernels visit instead."""
    length, window, tile = 48, 9, 12
    mask = Intervals.of_selection(length, window)
    row = numpy.arange(length)[:, None]
    kept = (mask.start <= row) & (row < mask.end)
    classes = numpy.zeros((length, length), dtype=int)
    lists = numpy.zeros((length, length), dtype=int)
    for first in range(0, length, tile):
        rows = slice(first, first + tile)
        full, partial = mask.columns(first, first + tile)
        for number, keys in ((1, full), (2, partial)):
            classes[rows, keys] = number * kept[rows, keys]
        order = numpy.concatenate([full, partial])
        lists[rows, : len(order)] = classes[rows, order]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 6), layout="constrained")
    for axis, squares in zip(axes, (classes, lists), strict=True):
        draw_classes(axis, squares, [UNSEEN, FULL, PARTIAL])
        for first in range(tile, length, tile):
            axis.axhline(first, color="black", linewidth=1)
    axes[0].set_title(f"the mask: {window} keys of each query; tiles of {tile} rows", fontsize=9)
    axes[1].set_title("the columns of each tile: full ones first, then partial ones", fontsize=9)
    axes[1].set_xlabel("column of the tile", fontsize=8)
    legend(figure, {"kept, column full": FULL, "kept, column partial": PARTIAL, "no work": UNSEEN})
    return save(figure, folder / "design-columns.png")


def counts(folder: Path) -> Path:
    """Draw the columns of each tile, and the keys that a kernel that skips blocks would visit."""
    length, window, block = 8192, 1024, 64
    mask = Intervals.of_selection(length, window)
    tiles = range(0, length, TILE_ROWS)
    lists = [mask.columns(first, first + TILE_ROWS) for first in tiles]
    full = [len(f) for f, _ in lists]
    together = [len(f) + len(p) for f, p in lists]
    blocks = [block * len(numpy.unique(numpy.concatenate(pair) // block)) for pair in lists]
    figure, axis = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    ends = [first + TILE_ROWS for first in tiles]
    axis.plot(
        *(ends, blocks),
        color=PARTIAL,
        linewidth=3,
        label=f"keys in blocks of {block} that have a kept key",
    )
    axis.plot(ends, ends, "--", color="black", label="keys up to the causal limit: dense attention")
    axis.plot(ends, together, color=FULL, linewidth=2.5, label="columns of the tile")
    axis.fill_between(ends, full, together, color=FULL, alpha=0.35, label="of these partial")
    axis.axhline(window, color="black", linewidth=0.6, linestyle=":")
    axis.set(xlabel=f"last query of the tile of {TILE_ROWS} rows", ylabel="keys")
    axis.set_title(f"{length} tokens, {window} kept, random bias", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8.5)
    return save(figure, folder / "design-counts.png")


def key_order(folder: Path) -> Path:
    """Draw the rows of the kept keys, in key order and in the order of the backward pass."""
    length, window = 16384, 1024
    mask = Intervals.of_selection(length, window)
    kept = numpy.flatnonzero(mask.start < mask.end)
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.8), sharey=True, layout="constrained")
    for axis, order, title in (
        (axes[0], kept, "in key order"),
        (axes[1], _scheduled(kept, mask.end), "in the order of the backward pass"),
    ):
        start, end = mask.start[order], mask.end[order]
        position = numpy.arange(len(order))
        visited = 0
        for first in range(0, len(order), BLOCK_KEYS):
            past = min(first + BLOCK_KEYS, len(order))
            low, high = start[first:past].min(), end[first:past].max()
            axis.fill_between([first, past], low, high, color=PARTIAL, alpha=0.45, linewidth=0)
            visited += (high - low) * (past - first)
        axis.vlines(position, start, end, color=FULL, linewidth=0.25)
        share = (end - start).sum() / visited
        axis.set_title(f"{title}: {share:.0%} of the visited pairs are kept", fontsize=9.5)
        axis.set(xlim=(0, len(order)), ylim=(length, 0), xlabel="kept key")
    axes[0].set_ylabel("query")
    legend(figure, {"rows that keep the key": FULL, f"rows of its block of {BLOCK_KEYS}": PARTIAL})
    return save(figure, folder / "design-key-order.png")


def _scheduled(kept: numpy.ndarray, end: numpy.ndarray) -> numpy.ndarray:
    """Order kept keys as key_order.cuh does: buckets by end, then their chunks by position."""
    ordered = []
    for bucket in numpy.split(kept, range(BUCKET_KEYS, len(kept), BUCKET_KEYS)):
        longest_first = bucket[numpy.argsort(-end[bucket].astype(numpy.int64), kind="stable")]
        for chunk in numpy.split(longest_first, range(CHUNK_KEYS, len(bucket), CHUNK_KEYS)):
            ordered.append(numpy.sort(chunk))
    return numpy.concatenate(ordered)


PICTURES = (columns, counts, key_order)
