# SPDX-License-Identifier: BSD-3-Clause
"""The loader of this process: of this machine, the installed packs and the real core."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from . import elf, macho, pe
from .candidates import ENTRY_POINT_GROUP
from .facts import Machine
from .resolver import Loader
from .trace import Trace

if TYPE_CHECKING:
    from flash_dmattn._core import Pack

__all__ = ["default_loader", "open_pack", "pack_for", "trace_for"]

_machine = Machine()
# The system's loader maps a file as its headers say. Where a download or a full disk has cut it
# off, the first access behind its end kills the process in place of giving an error.
_check_file = {"darwin": macho.check, "win32": pe.check}.get(sys.platform, elf.check)


def open_pack(path: str) -> Pack:
    """Open a library as a kernel pack.

    Raises:
        RuntimeError: it is damaged, for another machine, or no kernel pack.
        OSError: it cannot be read.
    """
    from flash_dmattn import _core

    _check_file(path, _machine.host().machine)
    return _core.load_pack(path)


def _abi_version() -> int:
    from flash_dmattn import _core

    return _core.PACK_ABI_VERSION


def _directories() -> Iterable[Path]:
    import flash_dmattn

    return [Path(directory) for directory in flash_dmattn.__path__]


def _entry_points() -> Iterable[metadata.EntryPoint]:
    return metadata.entry_points(group=ENTRY_POINT_GROUP)


default_loader = Loader(_machine, open_pack, _abi_version, _directories, _entry_points)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=default_loader.after_fork)


def pack_for(device_type: str, device_index: int | None = None) -> Pack:
    """Return the opened pack that serves a device; decided once per device and process.

    Args:
        device_type: such as ``"cpu"`` or ``"cuda"``.
        device_index: of the GPU; None is torch's current device.

    Raises:
        NoPackError: no pack serves the device; the text says what was looked for, what was found,
            and what to do.
        environment.InvalidVariableError: an environment variable has a value that is not allowed.
    """
    return default_loader.pack_for(device_type, device_index)


def trace_for(device_type: str, device_index: int | None = None) -> Trace:
    """Return which candidates were accepted or refused for a device, and why. It raises nothing."""
    return default_loader.trace_for(device_type, device_index)
