# SPDX-License-Identifier: BSD-3-Clause
"""The remedy in an error: one command or step."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from .facts import OWN_DISTRIBUTION

_WINDOWS = sys.platform == "win32"


def set_to(variable: str, value: str) -> str:
    """Return the command that sets a variable, in the system's usual shell."""
    return f'$env:{variable} = "{value}"' if _WINDOWS else f"export {variable}={value}"


def unset(variable: str) -> str:
    """Return the command that removes a variable."""
    return f"Remove-Item Env:{variable}" if _WINDOWS else f"unset {variable}"


INSTALL_BACKEND = "python -m pip install nanobind-backend"
PLAIN_PYTORCH = set_to("FLASH_DMATTN_BACKEND", "reference")
# For GPUs on which no pack has been run.
TRY = set_to("FLASH_DMATTN_UNTRIED", "1")
# For GPUs of AMD and Intel, which the flex backend does not support.
TRITON = set_to("FLASH_DMATTN_BACKEND", "triton") + "  # or reference"
PORTABLE = set_to("FLASH_DMATTN_BACKEND", "triton") + "  # or flex, or reference"
SHOW_GPUS = "nvidia-smi; echo $CUDA_VISIBLE_DEVICES"
_REINSTALL = "python -m pip install --force-reinstall --no-deps"
# An installation without metadata runs from the checkout.
_CHECKOUT = Path(__file__).parents[3]
_SOURCES = str(_CHECKOUT) if (_CHECKOUT / "pyproject.toml").is_file() else "CHECKOUT"


@functools.cache
def _addresses() -> Mapping[str, str]:
    """Return the project's URLs by name, from its metadata; empty without metadata."""
    try:
        lines = metadata.metadata(OWN_DISTRIBUTION).get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return {}
    return dict(line.split(", ", 1) for line in lines)


def index() -> str:
    """Return the URL of the project's own package index; "" without metadata."""
    pages = _addresses().get("Documentation", "")
    return f"{pages}simple/" if pages else ""


def reinstall(version: str | None, distribution: str = OWN_DISTRIBUTION, *options: str) -> str:
    """Return the command that reinstalls a distribution in the matching version.

    It names the project's own index: on the public one the name belongs to another project.
    """
    if distribution != OWN_DISTRIBUTION and not distribution.startswith(f"{OWN_DISTRIBUTION}-cu"):
        return f"install {distribution}=={version} from where it came"
    if version is None or not index():
        return f"{_REINSTALL} {_SOURCES}"
    return " ".join([_REINSTALL, "--index-url", index(), *options, f"{distribution}=={version}"])


def build(version: str | None, *options: str) -> str:
    """Return the command that builds a version from source on this machine, with its toolkit and
    libc.
    """
    sources = _addresses().get("Source")
    if version is None or sources is None:
        return " ".join([_REINSTALL, *options, _SOURCES])
    file = f"{OWN_DISTRIBUTION.replace('-', '_')}-{version}.tar.gz"
    return " ".join([_REINSTALL, *options, f"{sources}/releases/download/v{version}/{file}"])


def build_for(arch: str, version: str | None) -> str:
    """Return the command that builds the pack of an arch, such as ``sm90``, on this machine."""
    return build(version, f"--config-settings=cmake.define.FLASH_DMATTN_ARCHS={arch}")


def install_wheel(version: str | None) -> str:
    """Return the command that installs the wheel, which has the packs of all GPUs, in place of a
    build without a CUDA toolkit.
    """
    return reinstall(version, OWN_DISTRIBUTION, f"--only-binary {OWN_DISTRIBUTION}")


def after_opening(error: str, version: str | None, distribution: str) -> str:
    """Return the remedy for a file that could not be opened, by its error text."""
    library = re.search(r"dlopen failed: ([^/\s:]+): cannot open shared object file", error)
    if library is not None:
        return f"add the folder of {library[1]} to LD_LIBRARY_PATH"
    if re.search(r"version `[A-Z]+_[\d.]+' not found", error):
        return build(version)
    if "failed to map segment from shared object" in error:
        return "install into a folder whose file system is mounted without noexec"
    return reinstall(version, distribution)


def update_driver(version: str) -> str:
    """Return the remedy for an old NVIDIA driver; the command depends on the system."""
    return f"install NVIDIA driver {version} or newer: https://www.nvidia.com/drivers"
