# SPDX-License-Identifier: BSD-3-Clause
"""Time of calls: torch.utils.benchmark's on a CPU, CUDA events on a GPU, in turns.

On a GPU a buffer larger than the L2 cache is written before each call, outside the measured time.
Several calls are queued while the GPU still writes such buffers, so that it never waits for a host
that needs less than 10 ms for a call, however short the call is and whoever else uses the host. The
time of the host is a quantity of its own.
"""

from __future__ import annotations

import importlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.benchmark import Timer

Call = Callable[[], object]
# Seconds of one call, as often as fit into a time.
Sampler = Callable[[Call, float], list[float]]

# Rounds of contestants that take turns: drifting clocks then change their ratios little.
_ROUNDS = 3
_HOST_CALLS = 20
# Calls that are queued at once, and seconds of them: far from what fills the queue. The GPU is kept
# from them for no longer than this.
_QUEUED_CALLS, _QUEUED_SECONDS = 16, 0.01
# More than any L2 cache, and a time in which no GPU of today writes so much (9 TB/s).
_FLUSHED_BYTES = 256 << 20
_FLUSH_SECONDS = 30e-6
# Of the first call, of which nothing is known.
_FIRST_AHEAD = 1e-3


class Clock(NamedTuple):
    """How times are taken; ``replay`` is of work so short that decoders put it in a CUDA graph."""

    description: str
    sample: Sampler
    replay: Sampler


def clock_for(device: str, *, cpu_time: bool = False) -> Clock:
    """The clock for a torch device string such as ``cpu`` or ``cuda:0``.

    With ``cpu_time`` it is the processor's time of this process, all threads together: it does not
    run while others use the machine. With one thread it is what the wall clock would show on a
    machine of its own, but for caches that are shared.

    Raises:
        ValueError: the time of the processor is asked for on another device.
        ModuleNotFoundError: there is no Triton for times of a GPU.
    """
    if torch.device(device).type != "cuda":
        timer = time.process_time if cpu_time else time.perf_counter
        on_cpu = partial(_on_cpu, timer)
        return Clock(f"time.{timer.__name__}", on_cpu, on_cpu)
    if cpu_time:
        raise ValueError(f"--cpu-time is for CPUs; the device is {device}")
    testing: Any = importlib.import_module("triton.testing")
    about = "CUDA events; the L2 cache emptied before each call, calls queued ahead of the GPU"
    return Clock(about, _on_gpu, partial(_in_graph, testing.do_bench_cudagraph))


def _on_cpu(timer: Callable[[], float], call: Call, seconds: float) -> list[float]:
    return list(_timer(call, timer).blocked_autorange(min_run_time=seconds).times)


def _on_gpu(call: Call, seconds: float) -> list[float]:
    """Samples that last ``seconds`` together, after a call that is not counted unless the GPU needs
    as long as that for it.
    """
    (least,), host_seconds = _queued(call, 1, _FIRST_AHEAD)
    if least >= max(seconds, host_seconds):
        return [least]
    samples: list[float] = []
    while (left := seconds - sum(samples)) > 0:
        count = min(_QUEUED_CALLS, 1 + int(min(left, _QUEUED_SECONDS) / max(least, 1e-6)))
        behind = host_seconds - least  # what the host loses with each call
        if behind > 0:
            count = max(1, min(count, int((_QUEUED_SECONDS - host_seconds) / behind)))
        ahead = host_seconds + count * max(0.0, behind)
        found, host_seconds = _queued(call, count, min(ahead, _QUEUED_SECONDS))
        samples += found
        least = min(found)  # the others may have waited for the host
    return samples


def _queued(call: Call, count: int, ahead: float) -> tuple[list[float], float]:
    """Seconds of so many calls on the GPU, and of one on the host.

    The GPU is kept busy for ``ahead`` seconds first, while the calls are queued.
    """
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    event: Any = partial(torch.cuda.Event, enable_timing=True)
    events = [(event(), event()) for _ in range(count)]
    _finish()
    for _ in range(math.ceil(ahead / _FLUSH_SECONDS)):
        flushed.zero_()
    queued = time.perf_counter()
    for begin, end in events:
        flushed.zero_()
        begin.record()
        call()
        end.record()
    host_seconds = (time.perf_counter() - queued) / count
    _finish()
    return [begin.elapsed_time(end) / 1e3 for begin, end in events], host_seconds


def _in_graph(bench: Callable[..., list[float]], call: Call, seconds: float) -> list[float]:
    _finish()  # graphs are captured on another stream, which does not wait for this one
    return [ms / 1e3 for ms in bench(call, rep=1e3 * seconds, return_mode="all")]


def _timer(call: Call, timer: Callable[[], float]) -> Timer:
    threads = torch.get_num_threads()
    return Timer("call()", globals={"call": call}, timer=timer, num_threads=threads)


def in_turns(
    calls: Mapping[str, Call], sample: Sampler, seconds: float
) -> dict[str, list[float] | Exception]:
    """Samples of each call, in ``seconds`` for each, or the error with which one failed."""
    found: dict[str, list[float] | Exception] = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            earlier = found[name]
            if isinstance(earlier, Exception):
                continue
            try:
                earlier += sample(call, seconds / _ROUNDS)
            except Exception as error:  # whatever it is, the others go on
                found[name] = error
    return found


def host_samples(call: Call, seconds: float) -> list[float]:
    """Seconds until a call returns to the host, a few of them queued one after another.

    The queue is emptied between these, outside the measured time, so that it never fills up: then
    the host would wait for the GPU.
    """
    timer = _timer(call, time.perf_counter)
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while not samples or time.perf_counter() < end:
        _finish()
        samples += timer.timeit(_HOST_CALLS).times
    return samples


def _finish() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def summary(samples: Sequence[float], calls: int = 1) -> dict[str, Any]:
    """The fields of a record that samples fill; ``calls`` is how many each is the time of."""
    each = [sample / calls for sample in samples]
    low, _, high = statistics.quantiles(each * 2 if len(each) == 1 else each, method="inclusive")
    return {"value": statistics.median(each), "low": low, "high": high, "samples": len(each)}
