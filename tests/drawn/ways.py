# SPDX-License-Identifier: BSD-3-Clause
"""Calls that take a given way of the routes: sizes that are rarely drawn otherwise."""

from __future__ import annotations

import dataclasses
import functools
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import flash_dmattn
from flash_dmattn import IntervalMask
from routes.library import Routes, Spec
from support import cotangent

from .calls import Call
from .coverage import known_ways
from .problems import Drawn
from .source import Source

# The folder of the compiled routes, which processes share.
FOLDER = "FDM_ROUTES"
DRAWS = 20_000
# Products of the whole call for each (row, key) pair that float64 judges.
WORK_OF_PAIR = 2500
GRADIENTS = ("query", "key", "value", "bias", "sink")


@dataclasses.dataclass
class Sizes:
    """The sizes of the whole call; `Drawn` has at most two of its sequences and KV heads."""

    sequences: int
    kv_heads: int


@functools.cache
def compiled() -> Routes:
    """Return the routes, compiled once for this process and its children."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="routes-")
    return Routes.compiled(Path(os.environ[FOLDER]))


@functools.cache
def _ways(arch: int) -> list[str]:
    return sorted(way for way in known_ways(arch) if "no rows" not in way)


def draw_way(
    source: Source, dtypes: tuple[torch.dtype, ...], arch: int, sms: int, most: tuple[float, float]
) -> tuple[Drawn, Sizes]:
    """Draw a way, and a call that takes it.

    Args:
        source: of all choices and values.
        dtypes: of query, key and value, one of which is drawn.
        arch: of the tiles.
        sms: of the device.
        most: elements and products of the whole call.
    """
    routes, spec, limits = compiled(), None, (most[1] / WORK_OF_PAIR, *most)
    while spec is None:
        way, seed = source.choice(_ways(arch)), source.integer(1, 1 << 40)
        spec = routes.find_way(arch, sms, way, seed, draws=DRAWS, most=limits)
    drawn = Drawn(
        0,
        _call(source, spec, source.choice([t for t in dtypes if t.itemsize == 2])),
        poisoned=[],
        planned=False,
        selected=False,
        deterministic=bool(spec.deterministic),
        probabilities=False,
        poisoned_buffers=False,
        threads=1,
    )
    return drawn, Sizes(spec.batch, spec.kv_heads)


def _call(source: Source, spec: Spec, dtype: torch.dtype) -> Call:
    batch, kv_heads = min(spec.batch, 2), min(spec.kv_heads, 2)
    heads = kv_heads * (spec.heads // spec.kv_heads)
    rows = (batch, spec.queries, heads, spec.head_dim)
    columns = (batch, spec.keys, kv_heads, spec.head_dim)
    query, key, value, dout = (source.randn(*s).to(dtype) for s in (rows, columns, columns, rows))
    dlse = source.randn(batch, heads, spec.queries)
    call = Call(query, key, value, cotangent(dout.float()).to(dtype), dlse)
    call.causal = bool(spec.causal)
    call.softcap = 20.0 if spec.softcap else 0.0

    def shape(of_batch: int, of_heads: int, has_rows: bool) -> tuple[int, ...]:
        front = (batch if of_batch else 1, (1, kv_heads, heads)[of_heads])
        return (*front, spec.queries if has_rows else 1, spec.keys)

    bias_dtype = torch.float32 if spec.float32 else dtype
    if spec.bias:
        call.bias = source.randn(*shape(spec.bias_batch, spec.bias_heads, spec.bias == 2))
        call.bias = call.bias.to(bias_dtype)
    if spec.mask == 2:
        call.mask = _intervals(source, spec, shape(spec.mask_batch, spec.mask_heads, False))
    elif spec.mask:
        kept = shape(spec.mask_batch, spec.mask_heads, spec.mask == 3)
        call.mask = source.kept(kept, source.choice([0.1, 0.5, 0.9]))
    if spec.sink:
        call.sink = source.randn(heads)
    call.wanted = () if spec.forward_only else GRADIENTS
    return call


def _intervals(source: Source, spec: Spec, shape: tuple[int, ...]) -> IntervalMask:
    """Return the mask of a selection of this many keys, or of windows if max_kept is unknown."""
    if spec.max_kept and spec.causal:
        rank, window = source.randn(*shape), min(spec.max_kept, spec.keys)
        sizes = {"query_length": spec.queries, "key_length": spec.keys}
        made = flash_dmattn.dynamic_mask(rank, window, True, backend="reference", **sizes)
        if isinstance(made, IntervalMask):
            rows = {"query_length": spec.queries, "max_kept": spec.max_kept}
            return IntervalMask(made.start, made.end, **rows)
    width = source.choice([spec.queries // 16 + 1, spec.queries])
    batch, heads, _, keys = shape
    start = source.integers(-width, spec.queries + 1, batch, heads, keys)
    end: Tensor = start + source.integers(0, width + 1, batch, heads, keys)
    known = {"max_kept": spec.max_kept} if spec.max_kept else {}
    return IntervalMask(start, end, query_length=spec.queries, **known)
