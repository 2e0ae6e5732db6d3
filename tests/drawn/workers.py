# SPDX-License-Identifier: BSD-3-Clause
"""Processes that check seeds; a crash or hang of one does not affect the others."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import multiprocessing.connection
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from flash_dmattn import loader
from support import Target

# Seeds that a process gets at a time.
BLOCK = 16
# GPU memory in bytes that a process keeps between seeds; the other processes need memory too.
SHARE_OF_MEMORY = 4 << 30
# A process that reports that it cannot continue.
RETIRED = ("", "")


class Outcome(NamedTuple):
    """A seed's outcome: "right", "wrong", "refused" (not built), "error", "crash" or "hang"."""

    seed: int
    kind: str
    message: str = ""
    problem: str = ""
    launched: tuple[str, ...] = ()  # symbols of kernels


@dataclasses.dataclass
class Worker:
    """A process, and its seeds without a report, in its order."""

    process: Any
    connection: multiprocessing.connection.Connection
    waiting: list[int]
    since: float


def outcome_of(
    seed: int,
    target: Target,
    *,
    small: bool,
    many: bool = False,
    lists: bool = False,
    strict: bool = False,
) -> Outcome:
    """Check one seed in this process.

    Args:
        seed: of `draw`.
        target: on which device, by which backend.
        small: draw a small problem, and judge it on the CPU.
        many: repeat the sequences and heads of the problem.
        lists: of queries that list their keys.
        strict: raise errors other than wrong results.
    """
    from .check import check, check_many
    from .lists import draw_listed
    from .many import Limits, draw_many
    from .problems import draw

    problem = "could not be drawn"
    before = _launches(target)
    try:
        if many:
            drawn, repeater = draw_many(seed, target.dtypes, Limits.of(target))
            problem = f"{repeater.describe()} of {drawn.describe()}"
        else:
            drawn = (draw_listed if lists else draw)(seed, target.dtypes, small=small)
            problem = drawn.describe()
        if max(drawn.call.query.shape[-1], drawn.call.value.shape[-1]) > target.most_head_dim:
            return Outcome(seed, "refused", "its pack was built for smaller heads", problem)
        if many:
            check_many(drawn, repeater, target)
        else:
            check(drawn, target, judged_on="cpu" if small else target.device)
    except AssertionError as error:
        return Outcome(seed, "wrong", _line(error), problem)
    except NotImplementedError as error:
        # No call reaches a pack that refuses it, so its refusal is an error.
        kind = "error" if "unsupported problem" in str(error) else "refused"
        return Outcome(seed, kind, _line(error), problem)
    except Exception as error:
        if strict:
            raise
        return Outcome(seed, "error", f"{type(error).__name__}: {_line(error)}", problem)
    launched = tuple(
        symbol for symbol, count in _launches(target).items() if count > before.get(symbol, 0)
    )
    return Outcome(seed, "right", launched=launched)


def _launches(target: Target) -> dict[str, int]:
    return loader.pack_for(target.device).launch_counts if target.is_pack else {}


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:400]


def run(
    seeds: Iterator[int],
    job: Callable[[int], Outcome],
    *,
    workers: int,
    limit: float,
    start_limit: float = 120,
    until: float = math.inf,
) -> Iterator[Outcome]:
    """Yield the outcome of each seed, in any order; start none after the time `until`.

    Args:
        seeds: what to check.
        job: what to do with a seed; it is sent to the processes.
        workers: how many processes.
        limit: seconds that a seed may take.
        start_limit: seconds more for a process to start, which imports PyTorch.
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
            busy.append(_start(job, block, start_limit))
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
                        if outcome is None:  # it cannot continue
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
                    busy.append(_start(job, block, start_limit))
    finally:
        for worker in busy:
            _stop(worker)


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def _start(job: Callable[[int], Outcome], block: list[int], start_limit: float) -> Worker:
    # CUDA needs spawned processes: it cannot be used after a fork.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, job), daemon=True)
    process.start()
    theirs.close()
    ours.send(block)
    return Worker(process, ours, list(block), time.monotonic() + start_limit)


def _stop(worker: Worker) -> None:
    worker.process.kill()
    worker.process.join()
    worker.connection.close()


def _work(connection: Any, job: Callable[[int], Outcome]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    while (block := connection.recv()) is not None:
        for seed in block:
            outcome = job(seed)
            connection.send(outcome)
            if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > SHARE_OF_MEMORY:
                torch.cuda.empty_cache()
            if outcome.kind != "right" and not _is_sound():
                connection.send(None)
                return


def _is_sound() -> bool:
    """Return whether this process can still use its GPU; some CUDA errors are permanent."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
