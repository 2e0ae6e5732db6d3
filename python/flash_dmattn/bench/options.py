# SPDX-License-Identifier: BSD-3-Clause
"""Options and the progress bar of every subcommand that measures something."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm


def add_measuring(parser: argparse.ArgumentParser, *, budget: bool = True) -> None:
    """Options of every subcommand that measures something."""
    parser.add_argument("--device", help="a torch device (default: a GPU where there is one)")
    parser.add_argument("--threads", type=positive, help="of the CPU (default: what torch uses)")
    if budget:
        parser.add_argument(
            "--budget",
            type=float,
            metavar="SECONDS",
            help="begin nothing new after this time; what is missing is recorded as not measured",
        )
    parser.add_argument("--commit", help="of the sources, where the package is not run from them")
    parser.add_argument("--note", help="kept with the results: who else used the machine, say")
    parser.add_argument("--output", type=Path, help="write the results here as JSON")


def add_cpu_time(parser: argparse.ArgumentParser) -> None:
    """The option of what measures times of CPUs on machines that others use."""
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="on a CPU: the process's own time, for a machine that others use; with --threads 1",
    )


def positive(text: str) -> int:
    """A number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def default_device() -> str:
    """A GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def usable_device(name: str) -> str:
    """The device by its number, and the current one.

    Raises:
        ValueError: there is no such device here.
    """
    device = torch.device(name)
    if device.type != "cuda":
        return name
    if not torch.cuda.is_available():
        raise ValueError(f"the device is {name}, and torch finds no CUDA device")
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_device(index)
    return f"cuda:{index}"


def progress_bar(total: int) -> tuple[Any, Callable[[str], None]]:
    """A bar on standard error, seldom renewed where it is a log, and what tells it each step."""
    bar: Any = tqdm(
        total=total, unit="step", dynamic_ncols=True, mininterval=0.1 if sys.stderr.isatty() else 5
    )

    def tick(note: str) -> None:
        bar.set_postfix_str(note[:80], refresh=False)
        bar.update()

    return bar, tick
