# SPDX-License-Identifier: BSD-3-Clause
"""Peak extra memory of a call: what it needs beyond what was resident before it.

On Linux the kernel's own high-water mark of resident memory is reset before the call (``5`` written
to ``/proc/self/clear_refs``) and read after it, so every allocation counts, whoever makes it.
Elsewhere only the process's lifetime peak is known, which a call moves only if it exceeds all that
came before; that reading is a lower bound, exact in a fresh process. On CUDA the caching
allocator's own peak is used.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")

RESIDENT = "resident high-water mark, reset before the call"
LIFETIME = "lifetime peak of the process (lower bound)"
CUDA = "torch.cuda caching allocator"


@dataclass(frozen=True)
class PeakMemory:
    """Bytes beyond the baseline at the peak of a call, and how they were measured."""

    extra_bytes: int
    method: str


def peak_extra_memory(call: Callable[[], object], device: str = "cpu") -> PeakMemory:
    """Run ``call`` once and measure its peak extra memory.

    What the call returns counts as extra too; it is dropped before this function returns.
    """
    gc.collect()
    if torch.device(device).type == "cuda":
        return _on_cuda(call)
    _return_free_memory()
    if _reset_high_water():
        before = _status_bytes("VmRSS")
        call()
        return PeakMemory(max(_status_bytes("VmHWM") - before, 0), RESIDENT)
    lifetime = _lifetime_peak()
    call()
    return PeakMemory(_lifetime_peak() - lifetime, LIFETIME)


def _on_cuda(call: Callable[[], object]) -> PeakMemory:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return PeakMemory(torch.cuda.max_memory_allocated() - before, CUDA)


def _return_free_memory() -> None:
    """Give freed heap pages back: a call that reused them would look smaller than it is."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _reset_high_water() -> bool:
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    raise RuntimeError(f"{_STATUS} has no field {field}")


def _lifetime_peak() -> int:
    try:
        import resource
    except ImportError:
        raise RuntimeError("this system offers no measure of a process's peak memory") from None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
