# SPDX-License-Identifier: BSD-3-Clause
"""Where dynamic mask attention beats dense attention: a map over lengths and shares of kept keys.

``map`` measures one, ``map-show`` shows what was measured. Ours is the whole call: the selection
from a trainable bias, the plan and the attention. Dense attention has no mask and no bias, so that
PyTorch's fused kernels serve it, and is the fastest of those that run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import flash_dmattn_func
from .cases import PASSES, Case, Inputs, Pass, make_inputs
from .contestants import Contestant, FlashDmattn, SdpaExpanded, SdpaGqa, SdpaGrouped
from .gpu.clock import Effort, gpu_clock, timings
from .gpu.contestants import DenseCudnn, DenseFlash
from .gpu.progress import Progress
from .gpu.report import gpu_environment
from .map_report import KIND, SCHEMA, Cell, load, markdown, text, write_figure
from .report import describe_environment
from .timing import Clock


@dataclass(frozen=True)
class Survey:
    """What a map of one kind of device covers."""

    shape: Case
    lengths: tuple[int, ...]
    one_in: tuple[int, ...]  # of so many keys one is kept
    effort: Effort
    dense: tuple[type[Contestant], ...]


_ONE_IN = (1, 2, 4, 8, 16, 32, 64)
SURVEYS = {
    "cpu": Survey(
        Case(name="map", heads=8, kv_heads=2, head_dim=64, dtype="float32"),
        (512, 1024, 2048, 4096, 8192),
        _ONE_IN,
        Effort(seconds=2.0, least=5, most=30),
        (SdpaExpanded, SdpaGqa, SdpaGrouped),
    ),
    "cuda": Survey(
        Case(name="map", heads=32, kv_heads=8, head_dim=128, dtype="bfloat16", device="cuda"),
        (1024, 2048, 4096, 8192, 16384, 32768, 65536),
        _ONE_IN,
        Effort(seconds=0.15, least=3, most=20),
        (DenseFlash, DenseCudnn),
    ),
}


class Selecting(FlashDmattn):
    """This package with the selection in the call: all that replaces dense attention in a layer."""

    window = 0

    def prepare(self, which: Pass) -> None:
        """There is nothing to make before the call."""

    def attend(self) -> torch.Tensor:
        """Select and attend."""
        out = flash_dmattn_func(
            self.query,
            self.key,
            self.value,
            attn_bias=self.bias,
            is_causal=self.case.causal,
            window_size=self.window,
        )
        assert isinstance(out, torch.Tensor)
        return out

    def run_with(self, window: int, which: Pass) -> list[torch.Tensor]:
        """The timed call, for a number of kept keys."""
        self.window = window
        return self.run(which)


def survey_cells(survey: Survey, clock: Clock, advance: Callable[[str], object]) -> Iterator[Cell]:
    """Measure length by length, all contestants of a length in turns."""
    for length in survey.lengths:
        # Any window: it only asks for a bias.
        case = replace(survey.shape, length=length, window=length)
        inputs = make_inputs(case)
        ours = Selecting(case, inputs)
        dense = _dense_contestants(survey.dense, case, inputs)
        for which in PASSES:
            advance(f"{length} tokens, {which.replace('_', ' and ')}")
            windows = {one_in: max(1, length // one_in) for one_in in survey.one_in}
            calls: dict[str, Callable[[], object]] = {
                f"1/{one_in}": partial(ours.run_with, window, which)
                for one_in, window in windows.items()
            }
            calls |= {name: partial(contestant.run, which) for name, contestant in dense.items()}
            medians = {n: t.median for n, t in timings(calls, clock, survey.effort).items()}
            best = min(dense, key=medians.__getitem__)
            for one_in, window in windows.items():
                seconds = medians[f"1/{one_in}"], medians[best]
                yield Cell(length, window, one_in, which, *seconds, best)


def _dense_contestants(
    kinds: Sequence[type[Contestant]], case: Case, inputs: Inputs
) -> Mapping[str, Contestant]:
    """Those that run on this machine, by their names."""
    plain_case, plain_inputs = replace(case, window=None), replace(inputs, bias=None)
    contestants: dict[str, Contestant] = {}
    refusals = []
    for kind in kinds:
        if not kind.supports(plain_case):
            continue
        contestant = kind(plain_case, plain_inputs)
        try:
            contestant.run("forward_backward")
        except (RuntimeError, AttributeError, TypeError) as error:
            # PyTorch lacks this kernel, or it does not serve this device.
            refusals.append(f"{kind.__name__}: {error}")
            continue
        contestants[kind.__name__] = contestant
    if not contestants:
        raise RuntimeError(f"no dense attention runs here; {'; '.join(refusals)}")
    return contestants


def add_commands(commands: Any) -> None:
    """Add the subcommands to argparse's subparsers."""
    measuring = commands.add_parser(
        "map", help="over lengths and shares of kept keys, beside the best dense attention"
    )
    measuring.add_argument("--device", choices=tuple(SURVEYS), help="default: a GPU, if any")
    measuring.add_argument("--lengths", nargs="+", type=int, help="numbers of tokens")
    measuring.add_argument(
        "--one-in", nargs="+", type=int, metavar="N", help="of how many keys one is kept"
    )
    measuring.add_argument("--commit", help="of the sources, where the package is not run there")
    measuring.add_argument("--threads", type=int, help="on a CPU; default: what torch uses")
    measuring.add_argument("--output", type=Path, help="write the map here as JSON")

    showing = commands.add_parser("map-show", help="maps as tables and as a figure")
    showing.add_argument("maps", type=Path, nargs="+", help="what map --output wrote, in order")
    showing.add_argument("--markdown", action="store_true", help="tables as Markdown")
    showing.add_argument("--plot", type=Path, metavar="FILE", help="write the figure here")


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run either subcommand; returns the exit status."""
    try:
        return _measure(options) if options.command == "map" else _show(options)
    except (OSError, RuntimeError, ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))


def _measure(options: argparse.Namespace) -> int:
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, and torch finds no CUDA device")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    survey = SURVEYS[device]
    survey = replace(
        survey,
        lengths=tuple(options.lengths or survey.lengths),
        one_in=tuple(options.one_in or survey.one_in),
    )
    if min(*survey.lengths, *survey.one_in) < 1:
        raise ValueError("--lengths and --one-in must be at least 1")
    environment = (
        gpu_environment(f"cuda:{torch.cuda.current_device()}", options.commit)
        if device == "cuda"
        else describe_environment(device)
    )
    with Progress(len(survey.lengths) * len(PASSES)) as progress:
        cells = list(survey_cells(survey, gpu_clock(device), progress.advance))
    written = {
        "kind": KIND,
        "schema": SCHEMA,
        "environment": environment,
        "shape": asdict(survey.shape),
        "cells": [asdict(cell) for cell in cells],
    }
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(written, indent=1) + "\n")
    print(text(written, cells))
    return 0


def _show(options: argparse.Namespace) -> int:
    maps = [load(path) for path in options.maps]
    render = markdown if options.markdown else text
    print("\n\n".join(render(written, cells) for written, cells in maps))
    if options.plot is not None:
        write_figure(maps, options.plot)
        print(f"wrote {options.plot}", file=sys.stderr)
    return 0
