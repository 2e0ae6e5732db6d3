# SPDX-License-Identifier: BSD-3-Clause
"""Clocks for each kind of device, and repeated, interleaved measurements."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes the seconds that one call needs on its device."""

    def measure(self, call: Callable[[], object]) -> float: ...


class CpuClock:
    """Wall-clock time: CPU calls return when their work is done."""

    def measure(self, call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


class CudaClock:
    """Events on the current stream, so that the time to launch is not part of long kernels."""

    def measure(self, call: Callable[[], object]) -> float:
        event: Any = torch.cuda.Event  # untyped in torch
        start, stop = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3


def clock_for(device: str) -> Clock:
    """The clock for a torch device string such as ``cpu`` or ``cuda:0``."""
    return CudaClock() if torch.device(device).type == "cuda" else CpuClock()


@dataclass(frozen=True)
class Timing:
    """Seconds per call, in the order in which they were taken."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


def time_interleaved(
    calls: Mapping[str, Callable[[], object]],
    clock: Clock,
    repeats: int,
    tick: Callable[[], object] = lambda: None,
) -> dict[str, Timing]:
    """Time every call ``repeats`` times, in turns, after one call each that is not counted.

    Turns spread what else the machine does over all contestants alike. ``tick`` runs after each
    call, outside the measured time. Garbage collection is off while measuring.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; it must be at least 1")
    samples: dict[str, list[float]] = {name: [] for name in calls}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for repeat in range(repeats + 1):
            for name, call in calls.items():
                seconds = clock.measure(call)
                if repeat > 0:
                    samples[name].append(seconds)
                tick()
    finally:
        if collecting:
            gc.enable()
    return {name: Timing(tuple(values)) for name, values in samples.items()}
