# SPDX-License-Identifier: BSD-3-Clause
"""Facts of the machine: host, torch, NVIDIA driver, devices. Each is found at its first use."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import platform
import runpy
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from . import nvidia

OWN_DISTRIBUTION = "flash-dmattn"
# Manifest names of machines by the names that some systems use.
_MACHINE_NAMES = {"amd64": "x86_64", "arm64": "aarch64"}


class Host(NamedTuple):
    """The processor architecture, such as ``x86_64``, and the C library, such as ``glibc 2.35``."""

    machine: str
    libc: str


class Torch(NamedTuple):
    """The version of torch, and of the GPU platform that it is built with: NVIDIA's CUDA, AMD's
    ROCm, whose devices torch also calls cuda, or Intel's XPU; None for absent ones.
    """

    version: str
    cuda: str | None
    rocm: str | None = None
    xpu: str | None = None

    @property
    def platform(self) -> str:
        """The GPU platform of its build, such as ``CUDA 13.0``."""
        built = zip(("CUDA", "ROCm", "XPU"), self[1:], strict=True)
        return ", ".join(f"{name} {version}" for name, version in built if version)

    def __str__(self) -> str:
        """Show both, such as ``2.11.0, CUDA 13.0``."""
        return f"{self.version}, {self.platform or 'without CUDA'}"


class Driver(NamedTuple):
    """The version of the NVIDIA driver and the newest CUDA that it supports; None for unknown
    values.
    """

    version: str | None
    cuda: str | None

    def __str__(self) -> str:
        """Show the known values, such as ``580.65.06 (CUDA 13.0)``."""
        parts = [self.version, f"(CUDA {self.cuda})" if self.cuda else None]
        return " ".join(part for part in parts if part) or "of unknown version"


@dataclass(frozen=True)
class Device:
    """A device for tensors; ``capability`` is the compute capability of a GPU, such as ``9.0``."""

    kind: str
    index: int
    name: str = ""
    capability: str | None = None

    def __str__(self) -> str:
        """Show the device, such as ``cuda:0 (NVIDIA H200, compute capability 9.0)``."""
        place = self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"
        known = [self.name, f"compute capability {self.capability}" if self.capability else ""]
        described = ", ".join(part for part in known if part)
        return f"{place} ({described})" if described else place


class Situation(NamedTuple):
    """Everything that determines which pack serves one device."""

    package_version: str | None  # None: not installed as a distribution; versions are not compared
    abi_version: int | None  # None: the core could not be queried
    host: Host
    torch: Torch | None
    driver: Driver | None
    device: Device


class Machine:
    """The facts of this machine and this process."""

    def package_version(self, distribution: str = OWN_DISTRIBUTION) -> str | None:
        """Return the version of an installed distribution; None if it is not installed, for example
        if flash_dmattn is used from its sources.
        """
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return None

    @functools.cache  # noqa: B019 - one machine lives as long as the process
    def host(self) -> Host:
        """Return the processor architecture and the C library."""
        machine = platform.machine()
        libc = " ".join(part for part in platform.libc_ver() if part)
        return Host(_MACHINE_NAMES.get(machine.lower(), machine), libc or "unknown libc")

    def torch(self) -> Torch | None:
        """Return the torch of this process, or the one that it would import.

        torch is not imported, which would take seconds.
        """
        torch = sys.modules.get("torch")
        version = _installed_torch() if torch is None else vars(torch.version)
        if "__version__" not in version:
            return None
        return Torch(str(version["__version__"]), *map(version.get, ("cuda", "hip", "xpu")))

    @functools.cache  # noqa: B019
    def driver(self) -> Driver | None:
        """Return the NVIDIA driver, without initializing CUDA."""
        found = nvidia.driver_versions()
        return None if found is None else Driver(*found)

    @functools.cache  # noqa: B019
    def gpus(self) -> tuple[Device, ...]:
        """Return the visible GPUs of this process, in CUDA's order, or in the order of a torch that
        is built for GPUs of another vendor.

        This initializes the driver, but no device.
        """
        torch = self.torch()
        if torch is not None and (torch.rocm or torch.xpu):
            kind = "cuda" if torch.rocm else "xpu"
            return tuple(Device(kind, index) for index in range(_device_count(kind)))
        return tuple(
            Device("cuda", index, name, f"{major}.{minor}")
            for index, (name, (major, minor)) in enumerate(nvidia.visible_devices())
        )

    def current_cuda_device(self) -> int:
        """Return the index of torch's current device; 0 if torch has not initialized CUDA, because
        the query would initialize it.
        """
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return 0
        return int(torch.cuda.current_device())

    def after_fork(self) -> None:
        """Discard facts that do not hold in a child: if its parent used CUDA, it has no GPUs."""
        Machine.gpus.cache_clear()


@functools.cache
def _installed_torch() -> dict[str, Any]:
    """Return the definitions of ``torch/version.py``; empty if there is none."""
    try:
        spec = importlib.util.find_spec("torch")
        folders = None if spec is None else spec.submodule_search_locations
        return runpy.run_path(str(Path(folders[0], "version.py"))) if folders else {}
    except Exception:  # a broken installation; its import will raise the error
        return {}


def _device_count(kind: str) -> int:
    """Ask torch for the number of devices, which no NVIDIA library knows."""
    try:
        return int(getattr(importlib.import_module("torch"), kind).device_count())
    except Exception:  # a broken installation or driver; calls will raise the error
        return 0
