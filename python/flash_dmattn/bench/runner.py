# SPDX-License-Identifier: BSD-3-Clause
"""Runs a case: agreement first, then time, then memory in fresh processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from .cases import PASSES, Case, Pass, make_inputs, targets_for
from .contestants import CONTESTANTS, Contestant
from .memory import peak_extra_memory
from .timing import clock_for, time_interleaved

# Largest allowed |ours - theirs| / max |theirs|; both round each result to the dtype at least once.
AGREEMENT = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}

# Small enough to be free, large enough to start every thread: the warm-up before memory is read.
_WARM_UP_LENGTH = 128


@dataclass(frozen=True)
class MemoryUse:
    """Peak extra bytes with making the selection and mask, and of the call alone."""

    total_bytes: int
    call_bytes: int
    method: str


@dataclass(frozen=True)
class Entry:
    """One contestant's results in one pass. ``difference`` is relative to the first baseline."""

    contestant: str
    role: str
    median_s: float
    samples_s: tuple[float, ...]
    prepare_s: float
    difference: float
    memory: MemoryUse | None


@dataclass(frozen=True)
class Ratio:
    """Best baseline / ours, for time or memory, and the least value promised (None: no promise)."""

    quantity: str
    value: float
    target: float | None
    baseline: str

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.value >= self.target


@dataclass(frozen=True)
class CaseResult:
    """All contestants of one case in one pass, and the ratios that follow."""

    case: Case
    which: Pass
    entries: tuple[Entry, ...]
    ratios: tuple[Ratio, ...]


class DisagreementError(RuntimeError):
    """Contestants computed different things, so their times may not be compared."""


def run_case(
    case: Case,
    repeats: int,
    with_memory: bool,
    tick: Callable[[], object] = lambda: None,
) -> list[CaseResult]:
    """Measure every contestant that supports ``case``, forward and forward with backward.

    Raises DisagreementError when a contestant's output or gradients differ from the others'.
    """
    inputs = make_inputs(case)
    contestants = [kind(case, inputs) for kind in CONTESTANTS.values() if kind.supports(case)]
    return [_run_pass(case, which, contestants, repeats, with_memory, tick) for which in PASSES]


def _run_pass(
    case: Case,
    which: Pass,
    contestants: list[Contestant],
    repeats: int,
    with_memory: bool,
    tick: Callable[[], object],
) -> CaseResult:
    clock = clock_for(case.device)
    for contestant in contestants:
        contestant.prepare(which)  # warm: first use of a kernel is not what is measured
    prepare = {c.name: clock.measure(partial(c.prepare, which)) for c in contestants}
    differences = _compare(case, which, contestants)
    timings = time_interleaved(
        {c.name: partial(c.run, which) for c in contestants}, clock, repeats, tick
    )
    entries = tuple(
        Entry(
            contestant=c.name,
            role=c.role,
            median_s=timings[c.name].median,
            samples_s=timings[c.name].samples,
            prepare_s=prepare[c.name],
            difference=differences[c.name],
            memory=memory_in_fresh_process(case, c.name, which) if with_memory else None,
        )
        for c in contestants
    )
    return CaseResult(case, which, entries, _ratios(case, which, entries))


def _compare(case: Case, which: Pass, contestants: list[Contestant]) -> dict[str, float]:
    reference = next(c for c in contestants if c.role == "baseline")
    expected = reference.results(which)
    differences = {}
    for contestant in contestants:
        difference = max(
            ((ours - theirs).abs().max() / theirs.abs().max()).item()
            for ours, theirs in zip(contestant.results(which), expected, strict=True)
        )
        if not difference <= AGREEMENT[case.dtype]:
            raise DisagreementError(
                f"{contestant.name} differs from {reference.name} by {difference:.2e} of the "
                f"largest value in case {case.name!r}, {which}; allowed is {AGREEMENT[case.dtype]}"
            )
        differences[contestant.name] = difference
    return differences


def _ratios(case: Case, which: Pass, entries: tuple[Entry, ...]) -> tuple[Ratio, ...]:
    targets = targets_for(case)
    ours = next(e for e in entries if e.role == "ours")
    baselines = [e for e in entries if e.role == "baseline"]
    fastest = min(baselines, key=lambda e: e.median_s)
    ratios = [
        Ratio("time", fastest.median_s / ours.median_s, targets.time(which), fastest.contestant)
    ]
    if ours.memory is not None:
        totals = {e.contestant: e.memory.total_bytes for e in baselines if e.memory is not None}
        least = min(totals, key=totals.__getitem__)
        value = totals[least] / max(ours.memory.total_bytes, 1)
        ratios.append(Ratio("memory", value, targets.memory, least))
    return tuple(ratios)


def memory_in_fresh_process(case: Case, contestant: str, which: Pass) -> MemoryUse:
    """``measure_memory`` in a new Python, where no earlier call has left memory to reuse."""
    command = [
        *(sys.executable, "-m", "flash_dmattn.bench", "memory"),
        *("--case", json.dumps(asdict(case))),
        *("--contestant", contestant, "--pass", which),
        *("--threads", str(torch.get_num_threads())),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"measuring the memory of {contestant} failed:\n{done.stderr}")
    return MemoryUse(**json.loads(done.stdout))


def measure_memory(case: Case, contestant: str, which: Pass) -> MemoryUse:
    """Peak extra memory of one contestant's pass, in this process."""
    kind = CONTESTANTS[contestant]
    small = replace(case, length=min(case.length, _WARM_UP_LENGTH))
    _prepare_and_run(kind(small, make_inputs(small)), which)
    entry = kind(case, make_inputs(case))
    total = peak_extra_memory(lambda: _prepare_and_run(entry, which), case.device)
    call = peak_extra_memory(lambda: entry.run(which), case.device)
    return MemoryUse(total.extra_bytes, call.extra_bytes, total.method)


def _prepare_and_run(contestant: Contestant, which: Pass) -> None:
    contestant.prepare(which)
    contestant.run(which)
