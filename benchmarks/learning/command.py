# SPDX-License-Identifier: BSD-3-Clause
"""The options of ``python -m benchmarks learn``, and its execution."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..engine import release_memory
from ..figures import write_figures
from ..results import short_reason
from . import corpora, report
from .runs import Setting, run
from .variants import HEAD_DIM, default_names, make_attention

_SHORTEST = 256  # the least that the texts of probes need


def add_options(add: Callable[..., Any]) -> None:
    """Add the options of the study, besides those of the device."""
    add("--variants", nargs="+", metavar="NAME", help="as dense, sliding-1024 or dense/alibi")
    add("--corpus", choices=corpora.CORPORA, default="code", help="text of installed packages")
    add("--seeds", nargs="+", type=int, default=[0], help="of weights and batches (default: 0)")
    add("--seconds", type=float, help="of training each (default: 60)")
    add("--steps", type=int, help="of training each, instead of seconds")
    add("--length", type=int, help="tokens of a sequence (default: 16384; on a CPU 1024)")
    add("--batch", type=int, default=2, help="sequences of a step (default: 2)")
    add("--layers", type=int, default=6, help="of the model (default: 6)")
    add("--width", type=int, default=512, help=f"a multiple of {HEAD_DIM} (default: 512)")
    add("--learning-rate", type=float, default=1e-3, help="the highest (default: 0.001)")
    add("--minutes", type=float, default=math.inf, help="stop then; the same command goes on")
    add("--output", type=Path, help="folder of a JSON for each run, and of checkpoints")
    add("--table", nargs="+", type=Path, metavar="FILE", help="show these runs, and train none")
    add("--plot", type=Path, metavar="FOLDER", help="write a figure here")


def settings(options: argparse.Namespace, device: str) -> list[Setting]:
    """Return the runs of a command by seed, so that a time limit cuts off whole seeds."""
    length = options.length or (1024 if device == "cpu" else 16384)
    if length < _SHORTEST:
        raise ValueError(f"--length must be at least {_SHORTEST}, got {length}")
    if options.width < HEAD_DIM or options.width % HEAD_DIM:
        raise ValueError(f"--width must be a multiple of {HEAD_DIM}, got {options.width}")
    if options.seconds is not None and options.steps is not None:
        raise ValueError("give --seconds or --steps, not both")
    for name in ("seconds", "steps", "batch", "layers"):
        if (value := getattr(options, name)) is not None and value <= 0:
            raise ValueError(f"--{name} must be positive, got {value}")
    seconds = 60.0 if options.steps is None and options.seconds is None else options.seconds
    names = options.variants or default_names(length)
    for part in {part for name in names for part in name.split("/")}:
        make_attention(part, HEAD_DIM)
    sizes = (length, options.batch, options.layers, options.width, options.learning_rate)
    return [
        Setting(name, options.corpus, seed, seconds, options.steps, *sizes)
        for seed in options.seeds
        for name in names
    ]


def learn(options: argparse.Namespace, device: str) -> int:
    """Train missing runs, and show the finished ones. Return 3 if the time ran out."""
    until = time.monotonic() + 60 * options.minutes
    paths, missing = options.table, 0
    if paths is None:
        if options.output is None:
            raise ValueError("name a folder with --output, or files with --table")
        wanted = settings(options, device)
        options.output.mkdir(parents=True, exist_ok=True)
        corpus = corpora.load(options.corpus)
        for part in (corpus.train, corpus.held_out):
            if len(part) < wanted[0].length + 2:
                raise ValueError(f"too little text for --length {wanted[0].length}: {corpus.about}")
        done = []
        for setting in wanted:
            if time.monotonic() >= until:
                break
            try:
                if run(setting, corpus, device, options.output, until=until, commit=options.commit):
                    done.append(setting)
                    print(f"{setting.file} is done", file=sys.stderr)
            except (RuntimeError, NotImplementedError) as error:  # continue with the others
                print(f"{setting.file}: {short_reason(error)}", file=sys.stderr)
            release_memory()
        missing = len(wanted) - len(done)
        paths = [options.output / setting.file for setting in done]
    runs = report.read(paths)
    print("\n\n".join(map(str, report.tables(runs).values())))
    if missing:
        print(f"{missing} runs are not done; the same command goes on", file=sys.stderr)
    if options.plot is not None and runs:
        grouped = report.groups(runs).values()
        drawing = ("", lambda pyplot: report.draw(pyplot, grouped))
        write_figures({"learning": drawing}, options.plot)
    return 3 if missing else 0
