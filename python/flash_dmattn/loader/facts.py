# SPDX-License-Identifier: BSD-3-Clause
"""What is known of the machine: host, torch, NVIDIA driver, devices. Each is looked up when first
needed.
"""

from __future__ import annotations

import functools
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Protocol

from . import nvidia

__all__ = ["Device", "Driver", "Facts", "Host", "Machine", "Situation", "Torch", "package_version"]

# The names that manifests use, for those that some systems give instead.
_MACHINE_NAMES = {"amd64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True)
class Host:
    """The processor architecture, such as ``x86_64``, and the C library, such as ``glibc 2.35``."""

    machine: str
    libc: str


@dataclass(frozen=True)
class Torch:
    """The version of torch, and of the CUDA that it was built with; None if without CUDA."""

    version: str
    cuda: str | None


@dataclass(frozen=True)
class Driver:
    """The version of the NVIDIA driver and the newest CUDA that it can run; None for what it did
    not tell.
    """

    version: str | None
    cuda: str | None

    def __str__(self) -> str:
        """Show what is known, as ``580.65.06 (CUDA 13.0)``."""
        parts = [self.version, f"(CUDA {self.cuda})" if self.cuda else None]
        return " ".join(part for part in parts if part) or "of unknown version"


@dataclass(frozen=True)
class Device:
    """A device that tensors can be on; ``capability`` is the compute capability of a GPU, such as
    ``9.0``.
    """

    kind: str
    index: int
    name: str = ""
    capability: str | None = None

    def __str__(self) -> str:
        """Show the device, as ``cuda:0 (NVIDIA H200, compute capability 9.0)``."""
        place = self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"
        known = [self.name, f"compute capability {self.capability}" if self.capability else ""]
        described = ", ".join(part for part in known if part)
        return f"{place} ({described})" if described else place


@dataclass(frozen=True)
class Situation:
    """Everything that decides which pack serves one device.

    ``package_version`` is None where flash_dmattn is not installed as a distribution; versions are
    not compared then. ``abi_version`` is None where the core could not be asked.
    """

    package_version: str | None
    abi_version: int | None
    host: Host
    torch: Torch | None
    driver: Driver | None
    device: Device


class Facts(Protocol):
    """Where the facts come from: `Machine`, or what a test wants to be true."""

    def package_version(self) -> str | None: ...
    def host(self) -> Host: ...
    def torch(self) -> Torch | None: ...
    def driver(self) -> Driver | None: ...
    def cuda_devices(self) -> tuple[Device, ...]: ...
    def current_cuda_device(self) -> int: ...


class Machine:
    """The facts of this machine and this process."""

    def package_version(self) -> str | None:
        """Return the version of the installed distribution."""
        return package_version()

    @functools.cache  # noqa: B019 - one machine lives as long as the process
    def host(self) -> Host:
        """Return the processor architecture and the C library."""
        machine = platform.machine()
        libc = " ".join(part for part in platform.libc_ver() if part)
        return Host(_MACHINE_NAMES.get(machine.lower(), machine), libc or "unknown libc")

    def torch(self) -> Torch | None:
        """Return the torch of this process.

        It is never imported here: without torch its CUDA does not matter.
        """
        torch = sys.modules.get("torch")
        if torch is None:
            return None
        return Torch(str(torch.__version__), getattr(torch.version, "cuda", None))

    @functools.cache  # noqa: B019
    def driver(self) -> Driver | None:
        """Return the NVIDIA driver, without initializing CUDA."""
        found = nvidia.driver_versions()
        return None if found is None else Driver(*found)

    @functools.cache  # noqa: B019
    def cuda_devices(self) -> tuple[Device, ...]:
        """Return the GPUs that this process sees, in CUDA's order.

        This initializes the driver, but no device.
        """
        return tuple(
            Device("cuda", index, name, f"{major}.{minor}")
            for index, (name, (major, minor)) in enumerate(nvidia.visible_devices())
        )

    def current_cuda_device(self) -> int:
        """Return the index of torch's current device; 0 where torch does not use CUDA yet, since
        asking would initialize it.
        """
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return 0
        return int(torch.cuda.current_device())


def package_version() -> str | None:
    """Return the version of the installed distribution, or None if flash_dmattn is used without
    being installed.
    """
    try:
        return metadata.version("flash-dmattn")
    except metadata.PackageNotFoundError:
        return None
