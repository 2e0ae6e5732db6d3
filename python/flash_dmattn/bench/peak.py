# SPDX-License-Identifier: BSD-3-Clause
"""Peak extra memory of a contestant's call, in this process or in a fresh one."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial

import torch

from .cases import Case, Pass, make_inputs
from .contestants.base import Contestant
from .contestants.entrants import ENTRANTS
from .memory import peak_extra_memory

# Quantity, and the pass whose memory it is.
MEMORY_PASSES: dict[str, Pass] = {
    "memory_forward": "forward",
    "memory_forward_backward": "forward_backward",
    "memory_with_mask": "forward_backward",
}

# Small enough to be free, large enough to start every thread: the warm-up before memory is read.
_WARM_UP_LENGTH = 128


def measure_peak(contestant: Contestant, quantity: str) -> int:
    """Peak extra bytes, in this process, of a contestant that has a mask."""
    which = MEMORY_PASSES[quantity]
    call = contestant.prepare_and_run
    if quantity != "memory_with_mask":
        contestant.prepare(which)
        call = contestant.run
    return peak_extra_memory(partial(call, which), contestant.case.device).extra_bytes


def peak_in_fresh_process(case: Case, contestant: str, quantity: str) -> int:
    """The same in a new Python, where no earlier call has left memory to reuse."""
    command = [
        *(sys.executable, "-m", "flash_dmattn.bench", "peak"),
        *("--case", json.dumps(asdict(case))),
        *("--contestant", contestant, "--quantity", quantity),
        *("--threads", str(torch.get_num_threads())),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"measuring the memory of {contestant} failed: {done.stderr.strip()}")
    return int(done.stdout)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand, which other processes of the benchmark are started by."""
    parser.add_argument("--case", type=_case, required=True, help="the case as a JSON object")
    parser.add_argument("--contestant", choices=tuple(ENTRANTS), required=True)
    parser.add_argument("--quantity", choices=tuple(MEMORY_PASSES), required=True)
    parser.add_argument("--threads", type=int, required=True)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the bytes."""
    torch.set_num_threads(options.threads)
    kind = ENTRANTS[options.contestant].kind
    case: Case = options.case
    small = replace(case, length=min(case.length, _WARM_UP_LENGTH))
    kind(small, make_inputs(small)).prepare_and_run(MEMORY_PASSES[options.quantity])
    print(measure_peak(kind(case, make_inputs(case)), options.quantity))
    return 0


def _case(text: str) -> Case:
    try:
        return Case(**json.loads(text))
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"not a case: {error}") from None
