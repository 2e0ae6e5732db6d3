# SPDX-License-Identifier: BSD-3-Clause
"""Where dynamic mask attention beats dense attention: a map over lengths and shares of kept keys.

``map`` measures one, ``map-show`` shows what was measured. Ours is the whole call: the selection
from a trainable bias, the plan and the attention. Dense attention has no mask and no bias, so that
PyTorch's fused kernels serve it, and is the fastest of those that run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from .. import flash_dmattn_func
from .cases import PASSES, Case, Inputs, Pass, make_inputs
from .contestants.base import Contestant
from .contestants.entrants import ENTRANTS
from .contestants.ours import FlashDmattn
from .environment import describe_environment
from .map_report import KIND, SCHEMA, Cell, text
from .options import (
    add_cpu_time,
    add_measuring,
    default_device,
    positive,
    progress_bar,
    usable_device,
)
from .results import write_json
from .timing import Clock, Effort, clock_for, timings


@dataclass(frozen=True)
class Survey:
    """What a map of one kind of device covers."""

    shape: Case
    lengths: tuple[int, ...]
    one_in: tuple[int, ...]  # of so many keys one is kept
    effort: Effort
    dense: tuple[str, ...]  # names of contestants


_ONE_IN = (1, 2, 4, 8, 16, 32, 64)
SURVEYS = {
    "cpu": Survey(
        Case(name="map", heads=8, kv_heads=2, head_dim=64, dtype="float32"),
        (512, 1024, 2048, 4096, 8192),
        _ONE_IN,
        Effort(seconds=0.5, least=3, most=20),
        ("sdpa_expanded", "sdpa_gqa", "sdpa"),
    ),
    "cuda": Survey(
        Case(name="map", heads=32, kv_heads=8, head_dim=128, dtype="bfloat16", device="cuda"),
        (1024, 2048, 4096, 8192, 16384, 32768, 65536),
        _ONE_IN,
        Effort(seconds=0.15, least=3, most=20),
        ("dense_flash", "dense_cudnn"),
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
    names: Sequence[str], case: Case, inputs: Inputs
) -> Mapping[str, Contestant]:
    """Those that run on this machine, by their names."""
    plain_case, plain_inputs = replace(case, window=None), replace(inputs, bias=None)
    contestants: dict[str, Contestant] = {}
    refusals = []
    for name in names:
        contestant = ENTRANTS[name].kind(plain_case, plain_inputs)
        try:
            contestant.run("forward_backward")
        except (RuntimeError, AttributeError, TypeError) as error:
            # PyTorch lacks this kernel, or it does not serve this device.
            refusals.append(f"{name}: {error}")
            continue
        contestants[name] = contestant
    if not contestants:
        raise RuntimeError(f"no dense attention runs here; {'; '.join(refusals)}")
    return contestants


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``map``."""
    add_measuring(parser, budget=False)  # a map is whole, or none
    add_cpu_time(parser)
    parser.add_argument("--lengths", nargs="+", type=positive, help="numbers of tokens")
    parser.add_argument(
        "--one-in", nargs="+", type=positive, metavar="N", help="of how many keys one is kept"
    )


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Measure a map; returns the exit status."""
    try:
        return _measure(options)
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(str(error))


def _measure(options: argparse.Namespace) -> int:
    device = usable_device(options.device or default_device())
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    survey = SURVEYS[torch.device(device).type]
    survey = replace(
        survey,
        shape=replace(survey.shape, device=device),
        lengths=tuple(options.lengths or survey.lengths),
        one_in=tuple(options.one_in or survey.one_in),
    )
    clock = clock_for(device, cpu_time=options.cpu_time)
    environment = describe_environment(device, options.commit, options.note)
    environment["measurement"] = clock.description
    bar, tick = progress_bar(len(survey.lengths) * len(PASSES))
    with bar:
        cells = list(survey_cells(survey, clock, tick))
    written = {
        "kind": KIND,
        "schema": SCHEMA,
        "environment": environment,
        "shape": asdict(survey.shape),
        "cells": [asdict(cell) for cell in cells],
    }
    if options.output is not None:
        write_json(options.output, written)
    print(text(written, cells))
    return 0
