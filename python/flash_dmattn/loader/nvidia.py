# SPDX-License-Identifier: BSD-3-Clause
"""Queries to the NVIDIA driver through its C libraries, without the CUDA runtime and torch.

A missing library or a failure gives None or an empty list: a machine without a GPU is no error.
"""

from __future__ import annotations

import ctypes
import sys

_WINDOWS = sys.platform == "win32"
_CUDA_LIBRARY = "nvcuda.dll" if _WINDOWS else "libcuda.so.1"
_NVML_LIBRARY = "nvml.dll" if _WINDOWS else "libnvidia-ml.so.1"

_SUCCESS = 0
_COMPUTE_CAPABILITY = (75, 76)  # major and minor, of enum CUdevice_attribute
_TEXT_BYTES = 256


def driver_versions() -> tuple[str | None, str | None] | None:
    """Return the driver's version and the newest CUDA that it supports, such as ("580.65.06",
    "13.0").

    None if there is no driver. This does not initialize CUDA.
    """
    cuda = _open(_CUDA_LIBRARY)
    if cuda is None:
        return None
    number = ctypes.c_int(0)
    runs = None
    if cuda.cuDriverGetVersion(ctypes.byref(number)) == _SUCCESS and number.value > 0:
        runs = f"{number.value // 1000}.{number.value % 1000 // 10}"
    return _nvml_driver_version(), runs


def visible_devices() -> list[tuple[str, tuple[int, int]]]:
    """Return name and compute capability of each GPU that is visible to this process, in the
    driver's order.
    """
    cuda = _open(_CUDA_LIBRARY)
    count = ctypes.c_int(0)
    if cuda is None or cuda.cuInit(0) != _SUCCESS:
        return []
    if cuda.cuDeviceGetCount(ctypes.byref(count)) != _SUCCESS:
        return []
    return [_describe(cuda, ordinal) for ordinal in range(count.value)]


def _describe(cuda: ctypes.CDLL, ordinal: int) -> tuple[str, tuple[int, int]]:
    device, major, minor = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_int(0)
    name = ctypes.create_string_buffer(_TEXT_BYTES)
    cuda.cuDeviceGet(ctypes.byref(device), ordinal)
    cuda.cuDeviceGetName(name, _TEXT_BYTES, device)
    for value, attribute in zip((major, minor), _COMPUTE_CAPABILITY, strict=True):
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    return name.value.decode(errors="replace"), (major.value, minor.value)


def _nvml_driver_version() -> str | None:
    nvml = _open(_NVML_LIBRARY)
    if nvml is None or nvml.nvmlInit_v2() != _SUCCESS:
        return None
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    known = nvml.nvmlSystemGetDriverVersion(text, _TEXT_BYTES) == _SUCCESS
    nvml.nvmlShutdown()
    return text.value.decode(errors="replace") if known else None


def _open(library: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(library)
    except OSError:
        return None
