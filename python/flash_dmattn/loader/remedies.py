# SPDX-License-Identifier: BSD-3-Clause
"""The one command or step that an error offers."""

from __future__ import annotations

import re
import sys

from .facts import OWN_DISTRIBUTION

__all__ = [
    "INSTALL_BACKEND",
    "PLAIN_PYTORCH",
    "PORTABLE",
    "SHOW_GPUS",
    "TRITON",
    "TRY",
    "after_opening",
    "build",
    "build_for",
    "install_wheel",
    "reinstall",
    "set_to",
    "unset",
    "update_driver",
]

_WINDOWS = sys.platform == "win32"


def set_to(variable: str, value: str) -> str:
    """Return the command that sets a variable, in the system's usual shell."""
    return f'$env:{variable} = "{value}"' if _WINDOWS else f"export {variable}={value}"


def unset(variable: str) -> str:
    """Return the command that removes a variable."""
    return f"Remove-Item Env:{variable}" if _WINDOWS else f"unset {variable}"


INSTALL_BACKEND = "python -m pip install nanobind-backend"
PLAIN_PYTORCH = set_to("FLASH_DMATTN_BACKEND", "reference")
# Of GPUs on which no pack was run.
TRY = set_to("FLASH_DMATTN_UNTRIED", "1")
# Of AMD's GPUs, and of Intel's, for which the flex backend is not made.
TRITON = set_to("FLASH_DMATTN_BACKEND", "triton") + "  # or reference"
PORTABLE = set_to("FLASH_DMATTN_BACKEND", "triton") + "  # or flex, or reference"
SHOW_GPUS = "nvidia-smi; echo $CUDA_VISIBLE_DEVICES"


def reinstall(version: str | None, distribution: str = OWN_DISTRIBUTION, *options: str) -> str:
    """Return the command that installs a distribution again, of the version that fits."""
    requirement = distribution if version is None else f"{distribution}=={version}"
    return " ".join(["python -m pip install --force-reinstall --no-deps", *options, requirement])


def build(version: str | None, *options: str) -> str:
    """Return the command that builds flash_dmattn on the machine, with its toolkit and its libc."""
    return reinstall(version, OWN_DISTRIBUTION, f"--no-binary {OWN_DISTRIBUTION}", *options)


def build_for(arch: str, version: str | None) -> str:
    """Return the command that builds the pack of an arch, such as ``sm90``."""
    return build(version, f"--config-settings=cmake.define.FLASH_DMATTN_ARCHS={arch}")


def install_wheel(version: str | None) -> str:
    """Return the command that installs the wheel, which has the packs of all GPUs, in place of what
    was built on a machine without a CUDA toolkit.
    """
    return reinstall(version, OWN_DISTRIBUTION, f"--only-binary {OWN_DISTRIBUTION}")


def after_opening(error: str, version: str | None, distribution: str) -> str:
    """Return what to do about a file that could not be opened, for what was said of it."""
    library = re.search(r"dlopen failed: ([^/\s:]+): cannot open shared object file", error)
    if library is not None:
        return f"add the folder of {library[1]} to LD_LIBRARY_PATH"
    if re.search(r"version `[A-Z]+_[\d.]+' not found", error):
        return build(version)
    if "failed to map segment from shared object" in error:
        return "install into a folder whose file system is mounted without noexec"
    return reinstall(version, distribution)


def update_driver(version: str) -> str:
    """Return what to do about the NVIDIA driver; the command differs among systems."""
    return f"install NVIDIA driver {version} or newer: https://www.nvidia.com/drivers"
