# SPDX-License-Identifier: BSD-3-Clause
"""Clocks for calls that last microseconds to milliseconds on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..timing import Clock, CpuClock, Timing, time_interleaved

Call = Callable[[], object]

_MAX_LEAD = 64
_HOST_CALLS, _HOST_ROUNDS = 20, 10


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


@dataclass(frozen=True)
class Effort:
    """Seconds that timing calls in turns may take, and bounds of the repeats."""

    seconds: float = 0.5
    least: int = 7
    most: int = 50


FULL, LITTLE = Effort(), Effort(seconds=0.15, least=5, most=20)


def gpu_clock(device: str) -> Clock:
    """The clock for a device; tests run on CPUs too."""
    return GpuClock(device) if torch.device(device).type == "cuda" else CpuClock()


def timings(calls: Mapping[str, Call], clock: Clock, effort: Effort) -> dict[str, Timing]:
    """Time all calls in turns, as often as the effort allows."""
    once = time_interleaved(calls, clock, 1)
    round_seconds = sum(timing.median for timing in once.values())
    repeats = int(effort.seconds / max(round_seconds, 1e-9))
    return time_interleaved(calls, clock, min(max(repeats, effort.least), effort.most))


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
