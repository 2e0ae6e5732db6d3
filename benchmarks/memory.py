# SPDX-License-Identifier: BSD-3-Clause
"""Peak extra memory of a call: its need beyond the memory that is resident before it.

On CUDA it is the caching allocator's own peak. On a CPU it is the kernel's high-water mark of
resident memory, reset before the call (``5`` written to ``/proc/self/clear_refs``), so that every
allocation counts, by any library. If it cannot be reset, the reading is a lower bound.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

Result = TypeVar("Result")
PEAK_METHOD = "resident high-water mark, reset before each call where the system allows it"


def peak_extra_memory(call: Callable[[], object], device: str = "cpu") -> int:
    """Run ``call`` once and return its peak extra bytes, including its results."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    # Returns freed heap pages to the system: reusing them would hide memory of the call.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    before = _status_bytes("VmRSS" if _reset_peak() else "VmHWM")
    call()
    return max(_status_bytes("VmHWM") - before, 0)


def _reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {name}, so memory cannot be measured here")
    return int(found[1]) * 1024


def in_fresh_process(function: Callable[..., Result], *arguments: object) -> Result:
    """Call a function in a new Python process, which has no memory of earlier calls to reuse."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()
