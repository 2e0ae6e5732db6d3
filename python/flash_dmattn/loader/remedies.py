# SPDX-License-Identifier: BSD-3-Clause
"""The one command or step that an error offers."""

from __future__ import annotations

__all__ = ["build", "plain_pytorch", "reinstall", "unset", "update_driver"]

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


def unset(variable: str) -> str:
    """Return the command that removes a variable."""
    return f"unset {variable}"


def update_driver(version: str) -> str:
    """Return what to do about the NVIDIA driver; the command differs among systems."""
    return f"install NVIDIA driver {version} or newer: https://www.nvidia.com/drivers"


def plain_pytorch() -> str:
    """Return the command that makes plain PyTorch compute."""
    return "export FLASH_DMATTN_BACKEND=reference"


def _requirement(version: str | None, distribution: str) -> str:
    return distribution if version is None else f"{distribution}=={version}"
