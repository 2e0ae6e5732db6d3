# SPDX-License-Identifier: BSD-3-Clause
"""Clocks for each kind of device, and repeated, interleaved measurements."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

Call = Callable[[], object]

_MAX_LEAD = 64
_HOST_CALLS, _HOST_ROUNDS = 20, 10


class Clock(Protocol):
    """Takes the seconds that one call needs on its device."""

    description: str

    def measure(self, call: Call) -> float: ...


class CpuClock:
    """Wall-clock time: CPU calls return when their work is done."""

    description = "time.perf_counter"

    def measure(self, call: Call) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


class CpuTimeClock:
    """The processor's time of this process, all threads of it together.

    For a machine that others use: it does not run while they do. With one thread it is what the
    wall clock would show on a machine of its own, but for caches that are shared.
    """

    description = "time.process_time"

    def measure(self, call: Call) -> float:
        start = time.process_time()
        call()
        return time.process_time() - start


class GpuClock:
    """CUDA events around a call that finds the L2 cache cold and the queue full.

    Before each call a buffer larger than the L2 is written, as many times as it takes the host to
    queue the call meanwhile: so neither what the last call left in the cache nor the time to launch
    is part of the result. A call that itself waits for the GPU is measured with its waiting.
    """

    description = "CUDA events; L2 flushed by writing a buffer before each call"

    def __init__(self, device: str) -> None:
        properties: Any = torch.cuda.get_device_properties(device)
        size = max(2 * int(getattr(properties, "L2_cache_size", 0)), 128 << 20)
        self._flush = torch.empty(size, dtype=torch.uint8, device=device)
        self._lead = 1

    def measure(self, call: Call) -> float:
        """Seconds on the GPU."""
        event: Any = torch.cuda.Event  # untyped in torch
        while True:
            start, stop = event(enable_timing=True), event(enable_timing=True)
            torch.cuda.synchronize()
            for _ in range(self._lead):
                self._flush.zero_()
            start.record()
            call()
            stop.record()
            host_was_late = start.query()
            stop.synchronize()
            if not host_was_late or self._lead >= _MAX_LEAD:
                return float(start.elapsed_time(stop)) / 1e3
            self._lead *= 2


def clock_for(device: str, *, cpu_time: bool = False) -> Clock:
    """The clock for a torch device string such as ``cpu`` or ``cuda:0``.

    Raises:
        ValueError: the time of the processor is asked for on another device.
    """
    on_gpu = torch.device(device).type == "cuda"
    if cpu_time and on_gpu:
        raise ValueError(f"--cpu-time is for CPUs; the device is {device}")
    if cpu_time:
        return CpuTimeClock()
    return GpuClock(device) if on_gpu else CpuClock()


@dataclass(frozen=True)
class Timing:
    """Seconds per call, in the order in which they were taken."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


def time_interleaved(
    calls: Mapping[str, Call],
    clock: Clock,
    repeats: int,
    tick: Callable[[], object] = lambda: None,
    *,
    warm_up: bool = True,
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
        for repeat in range(repeats + warm_up):
            for name, call in calls.items():
                seconds = clock.measure(call)
                if repeat >= warm_up:
                    samples[name].append(seconds)
                tick()
    finally:
        if collecting:
            gc.enable()
    return {name: Timing(tuple(values)) for name, values in samples.items()}


@dataclass(frozen=True)
class Effort:
    """Seconds that timing calls in turns may take, and bounds of the repeats."""

    seconds: float = 0.5
    least: int = 7
    most: int = 50


FULL, LITTLE = Effort(), Effort(seconds=0.15, least=3, most=20)


def timings(calls: Mapping[str, Call], clock: Clock, effort: Effort) -> dict[str, Timing]:
    """Time all calls in turns, as often as the effort allows."""
    once = time_interleaved(calls, clock, 1)
    round_seconds = sum(timing.median for timing in once.values())
    repeats = min(max(int(effort.seconds / max(round_seconds, 1e-9)), effort.least), effort.most)
    more = time_interleaved(calls, clock, repeats - 1, warm_up=False) if repeats > 1 else {}
    return {
        name: Timing(first.samples + more[name].samples if name in more else first.samples)
        for name, first in once.items()
    }


@dataclass
class Deadline:
    """A time budget that begins now; None is without end."""

    seconds: float | None = None
    _start: float = field(default_factory=time.perf_counter)

    @property
    def passed(self) -> bool:
        """Whether the budget is spent: what has not begun shall not begin."""
        return self.seconds is not None and time.perf_counter() - self._start >= self.seconds

    @property
    def reason(self) -> str:
        """Why something was not measured."""
        return f"not measured: the time budget of {self.seconds:g} s was spent"


def host_timing(call: Call, device: str) -> Timing:
    """Seconds until a call returns to the host, many of them queued one after another.

    The queue is emptied now and then, outside the measured time, so that it never fills up: then
    the host would wait for the GPU.
    """
    synchronize: Call = lambda: None  # noqa: E731
    if torch.device(device).type == "cuda":
        synchronize = torch.cuda.synchronize
    samples = []
    for _ in range(_HOST_ROUNDS):
        synchronize()
        for _ in range(_HOST_CALLS):
            start = time.perf_counter()
            call()
            samples.append(time.perf_counter() - start)
    synchronize()
    # The first calls of a round fill caches of the host.
    return Timing(tuple(samples))


def captured(call: Call, device: str) -> Call:
    """A CUDA graph of the call, to replay; on a CPU, which has no graphs, the call itself."""
    if torch.device(device).type != "cuda":
        return call
    new_stream: Any = torch.cuda.Stream
    stream = new_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    replay: Call = graph.replay
    return replay
