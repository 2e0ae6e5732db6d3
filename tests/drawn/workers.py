# SPDX-License-Identifier: BSD-3-Clause
"""Processes that check seeds, of which one may crash or hang without harm to the others."""

from __future__ import annotations

import dataclasses
import multiprocessing
import multiprocessing.connection
import signal
import time
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from support import Target

# Seeds that a process gets at once.
BLOCK = 16
# Of a process that reports itself that it can go on no more.
RETIRED = ("", "")


class Outcome(NamedTuple):
    """What became of a seed: "right", "wrong", "refused" as not built, "error", "crash", "hang"."""

    seed: int
    kind: str
    message: str = ""
    problem: str = ""


@dataclasses.dataclass
class Worker:
    """A process, and the seeds that it has not reported yet, in its order."""

    process: Any
    connection: multiprocessing.connection.Connection
    waiting: list[int]
    since: float


def outcome_of(seed: int, target: Target, *, small: bool, strict: bool = False) -> Outcome:
    """Check one seed in this process; what is no wrong result goes through if strict."""
    from .check import check
    from .problems import draw

    problem = "could not be drawn"
    try:
        drawn = draw(seed, target.dtypes, small=small)
        problem = drawn.describe()
        check(drawn, target)
    except AssertionError as error:
        return Outcome(seed, "wrong", _line(error), problem)
    except NotImplementedError as error:
        return Outcome(seed, "refused", _line(error), problem)
    except Exception as error:
        if strict:
            raise
        return Outcome(seed, "error", f"{type(error).__name__}: {_line(error)}", problem)
    return Outcome(seed, "right")


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:400]


def run(
    seeds: Iterator[int], target: Target, *, small: bool, workers: int, limit: float, until: float
) -> Iterator[Outcome]:
    """Yield what becomes of each seed, in any order; after the time `until` start no more.

    Args:
        seeds: what to check.
        target: on which device, by which backend.
        small: as of `draw`.
        workers: processes.
        limit: seconds that a seed may take.
        until: of time.monotonic.
    """
    busy: list[Worker] = []
    again: list[int] = []

    def next_block() -> list[int]:
        if time.monotonic() >= until:
            taken, again[:] = list(again), []
            return taken
        while len(again) < BLOCK and (seed := next(seeds, None)) is not None:
            again.append(seed)
        taken, again[:] = again[:BLOCK], again[BLOCK:]
        return taken

    try:
        while len(busy) < workers and (block := next_block()):
            busy.append(_start(target, small, block))
        while busy:
            ready = multiprocessing.connection.wait([w.connection for w in busy], timeout=1)
            for worker in list(busy):
                gone = None
                if worker.connection in ready:
                    try:
                        outcome = worker.connection.recv()
                    except EOFError:
                        worker.process.join()
                        gone = ("crash", f"the process ended: {_ending(worker.process.exitcode)}")
                    else:
                        if outcome is None:  # it can go on no more
                            gone = RETIRED
                        else:
                            worker.waiting.remove(outcome.seed)
                            worker.since = time.monotonic()
                            yield outcome
                elif time.monotonic() - worker.since > limit:
                    gone = ("hang", f"no result after {limit:.0f} s")
                if gone is not None:
                    _stop(worker)
                    busy.remove(worker)
                    if worker.waiting and gone is not RETIRED:
                        yield Outcome(worker.waiting.pop(0), *gone)
                    again.extend(worker.waiting)
                elif not worker.waiting:
                    if block := next_block():
                        worker.waiting, worker.since = list(block), time.monotonic()
                        worker.connection.send(block)
                    else:
                        busy.remove(worker)
                        worker.connection.send(None)
                        worker.process.join()
                if gone is not None and (block := next_block()):
                    busy.append(_start(target, small, block))
    finally:
        for worker in busy:
            _stop(worker)


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def _start(target: Target, small: bool, block: list[int]) -> Worker:
    # Spawned: CUDA cannot be used in a process that was forked.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, target, small), daemon=True)
    process.start()
    theirs.close()
    ours.send(block)
    # Importing PyTorch on a busy machine takes a while.
    return Worker(process, ours, list(block), time.monotonic() + 120)


def _stop(worker: Worker) -> None:
    worker.process.kill()
    worker.process.join()
    worker.connection.close()


def _work(connection: Any, target: Target, small: bool) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    while (block := connection.recv()) is not None:
        for seed in block:
            outcome = outcome_of(seed, target, small=small)
            connection.send(outcome)
            if outcome.kind != "right" and target.device == "cuda" and not _is_sound():
                connection.send(None)
                return


def _is_sound() -> bool:
    """Say whether this process can still use its GPU, which after some errors it cannot."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
