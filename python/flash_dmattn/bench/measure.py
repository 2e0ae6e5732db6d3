# SPDX-License-Identifier: BSD-3-Clause
"""The subcommands that measure attention: each takes its quantities of the chosen cases."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .contestants.entrants import ENTRANTS
from .decode import run_decode
from .engine import Method, groups, run_workload, unmeasured
from .environment import describe_environment, gpu_state
from .options import (
    add_cpu_time,
    add_measuring,
    default_device,
    positive,
    progress_bar,
    usable_device,
)
from .plot import load_pyplot
from .records import Record, short_reason
from .results import shape_text, to_json, write_json
from .sets import SET_NAMES, workload_set
from .show import add_presentation, present
from .tables import Table
from .timing import FULL, LITTLE, Clock, Deadline, Effort, clock_for
from .workloads import QUANTITIES, Choice, Workload, chosen_workloads

_SHAPE_OPTIONS = {
    "batch": "sequences",
    "heads": "query heads",
    "kv_heads": "key/value heads",
    "head_dim": "dimension of a head",
    "length": "queries, and keys",
    "window": "keys that each query keeps",
}


@dataclass(frozen=True)
class View:
    """What a subcommand measures: all quantities where none are named."""

    about: str
    quantities: tuple[str, ...] | None = None
    decoding_only: bool = False
    device: str | None = None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options, which are the same for all views."""
        add_measuring(parser)
        add_cpu_time(parser)
        add_presentation(parser)
        parser.add_argument(
            "--set",
            default="standard",
            choices=SET_NAMES,
            help="cases to choose from (default: standard); legacy: 1.2.2's performance scripts",
        )
        parser.add_argument(
            "--list", action="store_true", help="show sets, cases, contestants and quantities"
        )
        parser.add_argument(
            "--cases", nargs="+", default=[], metavar="PATTERN", help="by name, as 'growth-*'"
        )
        for name, text in (
            ("contestants", "by default each case's own"),
            ("without", "contestants that are left out"),
        ):
            parser.add_argument(
                f"--{name}", nargs="+", choices=tuple(ENTRANTS), metavar="NAME", help=text
            )
        parser.add_argument(
            "--quantities", nargs="+", choices=tuple(QUANTITIES), metavar="NAME", help="see --list"
        )
        for name, text in _SHAPE_OPTIONS.items():
            option = f"--{name.replace('_', '-')}"
            parser.add_argument(option, type=positive, help=f"{text}, instead of each case's own")
        parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"))
        parser.add_argument("--seed", type=int, help="of the random numbers")
        parser.add_argument(
            "--quick", action="store_true", help="few cases, no slow contestants, fewer repeats"
        )
        parser.add_argument(
            "--seconds",
            type=float,
            help=f"timing of contestants that take turns may take (default: {FULL.seconds})",
        )

    def run(self, options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
        """Measure; returns the exit status."""
        try:
            options.device = usable_device(options.device or self.device or default_device())
            if options.list:
                print("\n\n".join(table.text() for table in _lists(options.set, options.device)))
                return 0
            if options.plot is not None:
                load_pyplot()  # now, rather than after minutes
            options.clock = clock_for(options.device, cpu_time=options.cpu_time)
            workloads = chosen_workloads(
                workload_set(options.set, options.device), self._choice(options), options.device
            )
        except (ValueError, RuntimeError, ModuleNotFoundError) as error:
            parser.error(str(error))
        return present(_run(workloads, options), options)

    def _choice(self, options: argparse.Namespace) -> Choice:
        wanted = options.quantities or self.quantities
        names = (*_SHAPE_OPTIONS, "dtype", "seed")
        given = ((name, getattr(options, name)) for name in names)
        return Choice(
            patterns=options.cases,
            contestants=options.contestants,
            without=options.without or (),
            quantities=wanted,
            quick=options.quick,
            decoding_only=self.decoding_only,
            shape=tuple((name, value) for name, value in given if value is not None),
        )


_MEMORY = tuple(q for q in QUANTITIES if q.startswith("memory"))
VIEWS = {
    "all": View("every quantity"),
    "gpu": View("the same on a GPU", device="cuda"),
    "cpu": View("the same on the CPU", device="cpu"),
    "forward": View(
        "forward pass, and making the mask", ("selection", "forward", "forward_with_mask")
    ),
    "backward": View(
        "backward pass, alone and after the forward pass",
        ("selection", "backward", "forward_backward", "end_to_end"),
    ),
    "decode": View("one query against many cached keys", decoding_only=True),
    "selection": View("making the mask from the bias", ("selection",)),
    "memory": View("peak extra memory", _MEMORY),
    "end-to-end": View(
        "with making the mask: forward, and training", ("forward_with_mask", "end_to_end")
    ),
}


def _effort(options: argparse.Namespace) -> Effort:
    effort = LITTLE if options.quick or options.set != "standard" else FULL
    if options.seconds is None:
        return effort
    return Effort(options.seconds, LITTLE.least, effort.most)


def _run(workloads: Sequence[Workload], options: argparse.Namespace) -> dict[str, Any]:
    """Measure, and write after each case, so that an interrupted run leaves what it has."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = options.device
    environment = describe_environment(device, options.commit, options.note)
    clock: Clock = options.clock
    environment["measurement"] = clock.description
    method = Method(
        clock, _effort(options), not device.startswith("cuda"), Deadline(options.budget)
    )
    records: list[Record] = []
    results = to_json(environment, workloads, records)
    bar, tick = progress_bar(sum(_steps(workload) for workload in workloads))
    with bar:
        for workload in workloads:
            measured = run_workload if workload.shape.queries is None else run_decode
            try:
                records.extend(measured(workload, method, tick))
            except Exception as error:  # its inputs may not fit the memory: the others go on
                names = workload.contestants
                records += unmeasured(workload, names, "inputs", short_reason(error))
            except KeyboardInterrupt:
                print("interrupted: here is what was measured", file=sys.stderr)
                break
            environment["state_after"] = gpu_state(device)
            results = to_json(environment, workloads, records)
            if options.output is not None:
                write_json(options.output, results)
    return results


def _steps(workload: Workload) -> int:
    decoding = workload.shape.queries is not None
    return len(workload.contestants) if decoding else len(groups(workload))


def _lists(chosen: str, device: str) -> list[Table]:
    sets = {name: workload_set(name, device) for name in SET_NAMES}
    shapes = to_json({}, list(sets[chosen].workloads.values()), [])["cases"].items()
    return [
        Table("Sets (--set)", ("", "cases"), tuple((n, s.about) for n, s in sets.items())),
        Table(
            f"Cases of {chosen} (--cases)",
            ("", "shape", "contestants"),
            tuple((n, shape_text(c), " ".join(c["contestants"])) for n, c in shapes),
        ),
        Table(
            "Contestants (--contestants, --without)",
            ("", "what it is", "attends to"),
            tuple((name, e.about, e.mask) for name, e in ENTRANTS.items()),
        ),
        Table("Quantities (--quantities)", ("", "what it is"), tuple(QUANTITIES.items())),
    ]
