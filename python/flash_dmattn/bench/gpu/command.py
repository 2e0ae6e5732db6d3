# SPDX-License-Identifier: BSD-3-Clause
"""The subcommands ``gpu``, which measures, and ``show``, which reads what was written."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from .bars import bars_table, verdicts
from .clock import FULL, LITTLE, gpu_clock
from .contestants import ENTRANTS
from .decode import run_decode
from .plot import load_pyplot, write_plots
from .progress import Progress
from .records import Record
from .report import case_tables, gpu_environment, gpu_state, heading, records_of, to_json
from .runner import failed, groups, run_workload
from .workloads import QUANTITIES, QUICK, WORKLOADS, Workload, chosen_workloads


def add_commands(commands: Any) -> None:
    """Add the subcommands to argparse's subparsers."""
    gpu = commands.add_parser(
        "gpu",
        help="every kind of mask on a GPU beside PyTorch's own attention",
        epilog=f"Cases: {', '.join(WORKLOADS)}. Quick ones: {', '.join(QUICK)}.",
    )
    gpu.add_argument("--device", default="cuda", help="a torch device (default: cuda)")
    gpu.add_argument(
        "--cases", nargs="+", default=[], metavar="PATTERN", help="by name, as 'growth-*'"
    )
    gpu.add_argument(
        "--contestants",
        nargs="+",
        choices=tuple(ENTRANTS),
        metavar="NAME",
        help=f"of {', '.join(ENTRANTS)}; by default each case's own",
    )
    gpu.add_argument(
        "--without",
        nargs="+",
        default=[],
        choices=tuple(ENTRANTS),
        metavar="NAME",
        help="contestants that are left out",
    )
    gpu.add_argument(
        "--quantities",
        nargs="+",
        choices=tuple(QUANTITIES),
        metavar="NAME",
        help=f"of {', '.join(QUANTITIES)}",
    )
    gpu.add_argument(
        "--quick", action="store_true", help="few cases, no slow contestants, fewer repeats"
    )
    gpu.add_argument("--commit", help="of the sources, where the package is not run from them")
    gpu.add_argument("--output", type=Path, help="write the results here as JSON")

    show = commands.add_parser("show", help="tables, bars and plots of results of a GPU")
    show.add_argument("results", type=Path, help="the JSON that gpu --output wrote")
    show.add_argument("--markdown", action="store_true", help="tables as Markdown")
    for command in (gpu, show):
        command.add_argument(
            "--bars", action="store_true", help="also show what the kernels are held to on an H200"
        )
        command.add_argument(
            "--check", action="store_true", help="exit with 2 when a bar is missed"
        )
        command.add_argument("--plot", type=Path, metavar="FOLDER", help="write plots here")


def measure(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run ``gpu``; returns the exit status."""
    try:
        if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
            parser.error(f"--device is {options.device}, and torch finds no CUDA device")
        if options.plot is not None:
            load_pyplot()  # now, rather than after minutes
        options.device = _with_index(options.device)
        workloads = chosen_workloads(
            options.cases,
            options.contestants,
            options.quantities,
            options.device,
            quick=options.quick,
            without=options.without,
        )
    except (ValueError, RuntimeError, ModuleNotFoundError) as error:
        parser.error(str(error))
    return _present(_run(workloads, options), options, markdown=False)


def show(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run ``show``; returns the exit status."""
    try:
        written = json.loads(options.results.read_text())
        records_of(written)
        return _present(written, options, options.markdown)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        parser.error(f"{options.results}: {error}")


def _with_index(name: str) -> str:
    """The device by its number, and the current one."""
    device = torch.device(name)
    if device.type != "cuda":
        return name
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_device(index)
    return f"cuda:{index}"


def _run(workloads: list[Workload], options: argparse.Namespace) -> dict[str, Any]:
    """Measure, and write after each case, so that an interrupted run leaves what it has."""
    environment = gpu_environment(options.device, options.commit)
    clock = gpu_clock(options.device)
    effort = LITTLE if options.quick else FULL
    records: list[Record] = []
    written: dict[str, Any] = {}
    with Progress(sum(_steps(workload) for workload in workloads)) as progress:
        for workload in workloads:
            measured = run_workload if workload.queries is None else run_decode
            try:
                for record in measured(workload, clock, effort, progress.advance):
                    records.append(record)
            except Exception as error:  # its inputs may not fit the memory: the others go on
                records += failed(workload, error)
            environment["state_after"] = gpu_state(options.device)
            written = to_json(environment, workloads, records)
            if options.output is not None:
                options.output.parent.mkdir(parents=True, exist_ok=True)
                options.output.write_text(json.dumps(written, indent=1) + "\n")
    return written


def _steps(workload: Workload) -> int:
    return len(groups(workload)) if workload.queries is None else len(workload.contestants)


def _present(written: dict[str, Any], options: argparse.Namespace, markdown: bool) -> int:
    tables = case_tables(written)
    found = verdicts(records_of(written))
    if options.bars:
        tables.append(bars_table(found))
    shown = [table.markdown() if markdown else table.text() for table in tables]
    print("\n\n".join([heading(written["environment"]), *shown]))
    if options.plot is not None:
        for path in write_plots(written, options.plot):
            print(f"wrote {path}", file=sys.stderr)
    return 2 if options.check and any(verdict.met is False for verdict in found) else 0
