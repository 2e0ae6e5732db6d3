# SPDX-License-Identifier: BSD-3-Clause
"""The one command or step that an error offers."""

from __future__ import annotations

import re

__all__ = [
    "after_opening",
    "build",
    "install_backend",
    "install_wheel",
    "plain_pytorch",
    "portable",
    "reinstall",
    "show_gpus",
    "unset",
    "update_driver",
]

DISTRIBUTION = "flash-dmattn"


def reinstall(version: str | None, distribution: str = DISTRIBUTION) -> str:
    """Return the command that installs a distribution again, of the version that fits."""
    return (
        f"python -m pip install --force-reinstall --no-deps {_requirement(version, distribution)}"
    )


def build(arch: str, version: str | None) -> str:
    """Return the command that builds the pack of an arch, such as ``sm90``, with the CUDA toolkit
    of the machine.
    """
    return (
        f"python -m pip install --force-reinstall --no-deps --no-binary {DISTRIBUTION} "
        f"--config-settings=cmake.define.FLASH_DMATTN_ARCHS={arch} "
        f"{_requirement(version, DISTRIBUTION)}"
    )


def install_wheel(version: str | None) -> str:
    """Return the command that installs the wheel, which has the packs of all GPUs, in place of what
    was built on a machine without a CUDA toolkit.
    """
    return (
        f"python -m pip install --force-reinstall --no-deps --only-binary {DISTRIBUTION} "
        f"{_requirement(version, DISTRIBUTION)}"
    )


def install_backend() -> str:
    """Return the command that installs what the extension module needs."""
    return "python -m pip install nanobind-backend"


def after_opening(error: str, version: str | None, distribution: str) -> str:
    """Return what to do about a file that could not be opened, for what was said of it."""
    library = re.search(r"dlopen failed: ([^/\s:]+): cannot open shared object file", error)
    if library is not None:
        return f"add the folder of {library[1]} to LD_LIBRARY_PATH"
    if re.search(r"version `[A-Z]+_[\d.]+' not found", error):
        return (
            f"python -m pip install --force-reinstall --no-deps --no-binary {DISTRIBUTION} "
            f"{_requirement(version, DISTRIBUTION)}"
        )
    if "failed to map segment from shared object" in error:
        return "install into a folder whose file system is mounted without noexec"
    return reinstall(version, distribution)


def unset(variable: str) -> str:
    """Return the command that removes a variable."""
    return f"unset {variable}"


def update_driver(version: str) -> str:
    """Return what to do about the NVIDIA driver; the command differs among systems."""
    return f"install NVIDIA driver {version} or newer: https://www.nvidia.com/drivers"


def show_gpus() -> str:
    """Return what tells whether the driver works, and which GPUs a process may use."""
    return "nvidia-smi; echo $CUDA_VISIBLE_DEVICES"


def plain_pytorch() -> str:
    """Return the command that makes plain PyTorch compute."""
    return "export FLASH_DMATTN_BACKEND=reference"


def portable() -> str:
    """Return the command that makes a backend compute which needs no pack: on GPUs that are not
    NVIDIA's.
    """
    return "export FLASH_DMATTN_BACKEND=triton  # or flex, or reference"


def _requirement(version: str | None, distribution: str) -> str:
    return distribution if version is None else f"{distribution}=={version}"
