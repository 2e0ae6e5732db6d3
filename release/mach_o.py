# SPDX-License-Identifier: BSD-3-Clause
"""Reads the dependencies and exports of a shared library of macOS from its load commands.

delocate reports less and needs programs of macOS, but gates also run on Linux.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from release.binaries import Library
from release.project import ReleaseError

MAGIC = 0xFEEDFACF.to_bytes(4, "little")
_MACHINES = {0x01000007: "x86_64", 0x0100000C: "aarch64"}
_HEADER = struct.Struct("<IIIIIIII")
# Kinds of load commands. The system must understand those with the bit _REQUIRED.
_REQUIRED = 0x80000000
_SYMBOLS, _DYLIB, _WEAK_DYLIB, _REEXPORT, _RUN_PATH = 0x2, 0xC, 0x18, 0x1F, 0x1C
_CODE_SIGNATURE, _BUILD_VERSION, _OLD_VERSION = 0x1D, 0x32, 0x24
# Bits of a symbol's type: debugging symbol, private to the library, kind, external.
_STAB, _PRIVATE, _KIND, _EXTERNAL = 0xE0, 0x10, 0x0E, 0x01


def read_mach_o(content: bytes) -> Library:
    """Read a shared library for one machine.

    Raises:
        ReleaseError: the library cannot be read.
    """
    try:
        return _read(content)
    except (struct.error, IndexError, ValueError) as error:
        raise ReleaseError(f"it cannot be read as Mach-O: {error}") from error


def _read(content: bytes) -> Library:
    number = _HEADER.unpack_from(content)[1]
    needed, run_paths = [], []
    exports: tuple[str, ...] = ()
    versions: dict[str, str] = {}
    signed = False
    for kind, command in _commands(content):
        if kind in (_DYLIB, _WEAK_DYLIB, _REEXPORT):
            needed.append(_text(command))
        elif kind == _RUN_PATH:
            run_paths.append(_text(command))
        elif kind == _SYMBOLS:
            exports = _exports(content, *struct.unpack_from("<III", command, 8))
        elif kind in (_BUILD_VERSION, _OLD_VERSION):
            (version,) = struct.unpack_from("<I", command, 12 if kind == _BUILD_VERSION else 8)
            versions["macOS"] = f"{version >> 16}.{version >> 8 & 0xFF}"
        elif kind == _CODE_SIGNATURE:
            signed = True
    machine = _MACHINES.get(number, f"{number:#x}")
    unsigned = machine == "aarch64" and not signed
    return Library(
        machine=machine,
        needed=tuple(needed),
        run_paths=tuple(run_paths),
        exports=exports,
        versions=versions,
        weaknesses=("has no signature, without which macOS opens no arm64 code",) * unsigned,
        device_code=frozenset(),
    )


def _commands(content: bytes) -> Iterator[tuple[int, bytes]]:
    offset = _HEADER.size
    for _ in range(_HEADER.unpack_from(content)[4]):
        kind, size = struct.unpack_from("<II", content, offset)
        yield kind & ~_REQUIRED, content[offset : offset + size]
        offset += size


def _text(command: bytes) -> str:
    """Return the text of a command. Its offset follows the command's head."""
    (start,) = struct.unpack_from("<I", command, 8)
    return command[start:].partition(b"\0")[0].decode()


def _exports(content: bytes, start: int, count: int, texts: int) -> tuple[str, ...]:
    """Return the names of exported symbols, without the leading underscore of C names."""
    found = []
    for index in range(count):
        place, kind = struct.unpack_from("<IB", content, start + 16 * index)
        seen = kind & _EXTERNAL and not kind & (_STAB | _PRIVATE)
        if seen and kind & _KIND:  # 0: a symbol of another library
            end = content.index(b"\0", texts + place)
            found.append(content[texts + place : end].decode().removeprefix("_"))
    return tuple(sorted(found))
