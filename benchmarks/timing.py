# SPDX-License-Identifier: BSD-3-Clause
"""Times of calls in turns: torch.utils.benchmark on a CPU, CUDA events on a GPU.

On a GPU a buffer larger than the L2 cache is written before each call, outside of the measured
time. Several calls are queued while the GPU still writes such buffers. So the GPU never waits for a
host that needs less than 10 ms per call, however short the call is and whoever else uses the host.
Host time is a separate quantity.
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
# Seconds per call, for as many calls as fit into a time.
Sampler = Callable[[Call, float], list[float]]

# Rounds of contestants in turns, so that clock drift has little effect on their ratios.
_ROUNDS = 3
_HOST_CALLS = 20
# Calls that are queued at once, and their seconds: far below the queue's capacity. The GPU is kept
# busy before them for no longer than this.
_QUEUED_CALLS, _QUEUED_SECONDS = 16, 0.01
# More than any L2 cache, and a lower bound of the time to write it on current GPUs (9 TB/s).
_FLUSHED_BYTES = 256 << 20
_FLUSH_SECONDS = 30e-6
# For the first call, whose times are unknown.
_FIRST_AHEAD = 1e-3


class Clock(NamedTuple):
    """Samplers of times; ``replay`` is for short work that decoders put into a CUDA graph."""

    description: str
    sample: Sampler
    replay: Sampler


def clock_for(device: str, *, cpu_time: bool = False) -> Clock:
    """Return the clock for a torch device string such as ``cpu`` or ``cuda:0``.

    With ``cpu_time`` it is the CPU time of this process, summed over threads: it excludes the time
    of other processes. With one thread it equals the wall clock of an idle machine, except for the
    effect of shared caches.

    Raises:
        ValueError: CPU time is requested on another device.
        ModuleNotFoundError: Triton, needed for times on a GPU, is absent.
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
    """Return samples with a sum of ``seconds``. The first call does not count, unless the GPU needs
    at least ``seconds`` for it.
    """
    (least,), host_seconds = _queued(call, 1, _FIRST_AHEAD)
    if least >= max(seconds, host_seconds):
        return [least]
    samples: list[float] = []
    while (left := seconds - sum(samples)) > 0:
        count = min(_QUEUED_CALLS, 1 + int(min(left, _QUEUED_SECONDS) / max(least, 1e-6)))
        behind = host_seconds - least  # lag of the host per call
        if behind > 0:
            count = max(1, min(count, int((_QUEUED_SECONDS - host_seconds) / behind)))
        ahead = host_seconds + count * max(0.0, behind)
        found, host_seconds = _queued(call, count, min(ahead, _QUEUED_SECONDS))
        samples += found
        least = min(found)  # other samples may include waits for the host
    return samples


def _queued(call: Call, count: int, ahead: float) -> tuple[list[float], float]:
    """Return the seconds of ``count`` calls on the GPU, and of one call on the host.

    The GPU is first kept busy for ``ahead`` seconds, while the calls are queued.
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
    """Return samples of each call, in ``seconds`` for each, or the error of a failed one."""
    found: dict[str, list[float] | Exception] = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            earlier = found[name]
            if isinstance(earlier, Exception):
                continue
            try:
                earlier += sample(call, seconds / _ROUNDS)
            except Exception as error:  # continue with the others after any error
                found[name] = error
    return found


def host_samples(call: Call, seconds: float) -> list[float]:
    """Return the seconds until a call returns to the host, in small queued batches.

    Between batches the queue is drained, outside of the measured time. A full queue would make the
    host wait for the GPU.
    """
    timer = _timer(call, time.perf_counter)
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while not samples or time.perf_counter() < end:
        _finish()
        samples += timer.timeit(_HOST_CALLS).times
    return samples


def _finish() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def summary(samples: Sequence[float], calls: int = 1) -> dict[str, Any]:
    """Return the record fields of samples; ``calls`` is the number of calls in each sample."""
    each = [sample / calls for sample in samples]
    low, _, high = statistics.quantiles(each * 2 if len(each) == 1 else each, method="inclusive")
    return {"value": statistics.median(each), "low": low, "high": high, "samples": len(each)}
