# SPDX-License-Identifier: BSD-3-Clause
"""Time of calls: torch.utils.benchmark's on a CPU, Triton's on a GPU, in turns.

On a GPU ``triton.testing.do_bench`` empties the L2 cache before each call, outside the measured
time, and queues the calls one after another, so that the host runs ahead.
"""

from __future__ import annotations

import importlib
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
    about = "triton.testing.do_bench: CUDA events, the L2 cache emptied before each call"
    eager = partial(testing.do_bench, warmup=10)
    return Clock(about, partial(_on_gpu, eager), partial(_on_gpu, testing.do_bench_cudagraph))


def _on_cpu(timer: Callable[[], float], call: Call, seconds: float) -> list[float]:
    return list(_timer(call, timer).blocked_autorange(min_run_time=seconds).times)


def _on_gpu(bench: Callable[..., list[float]], call: Call, seconds: float) -> list[float]:
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
