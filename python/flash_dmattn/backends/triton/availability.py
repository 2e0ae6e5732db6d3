# SPDX-License-Identifier: BSD-3-Clause
"""Whether the Triton kernels can run here. The check imports triton only if there is a GPU."""

from __future__ import annotations

import importlib.util
import os
import re

import torch

# The version that torch 2.5 ships with.
LOWEST_VERSION = "3.1"
# torch's names of GPUs that Triton has a compiler for: NVIDIA and AMD, and Intel.
_GPUS = ("cuda", "xpu")


def why_unavailable(device_type: str | None = None) -> str | None:
    """Return why it cannot compute on a type of device, or on any here; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    return _device_reason(device_type) or _version_reason()


def _version_reason() -> str | None:
    import triton

    if _numbers(triton.__version__) >= _numbers(LOWEST_VERSION):
        return None
    return (
        f"triton is {triton.__version__}, and {LOWEST_VERSION} or newer is needed: "
        "pip install --upgrade triton"
    )


def _device_reason(device_type: str | None) -> str | None:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device_type == "cpu":
        return None if interpreted else "on a CPU it needs TRITON_INTERPRET=1, and is slow"
    if device_type not in (None, *_GPUS):
        return f"it runs on GPUs that torch calls {' or '.join(_GPUS)}, not on {device_type}"
    if interpreted and device_type is None:
        return None
    asked = _GPUS if device_type is None else (device_type,)
    if not any(getattr(torch, name).is_available() for name in asked):
        return "torch sees no GPU" if device_type is None else f"torch sees no {device_type} device"
    return "TRITON_INTERPRET=1 is for tensors on a CPU" if interpreted else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
