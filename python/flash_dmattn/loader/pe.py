# SPDX-License-Identifier: BSD-3-Clause
"""Header checks of a Windows shared library before it is opened; see macho.py."""

from __future__ import annotations

import struct
from pathlib import Path

from . import messages
from .errors import LibraryFileError, check_machine, truncated

_DOS_HEADER = 64  # bytes; the last four are the offset of the header below
_HEADER = struct.Struct("<4sHHIIIHHH")  # signature, COFF header, magic of the optional header
_SECTION = struct.Struct("<8sIIII16x")
_DLL, _64_BITS = 0x2000, 0x20B
_MACHINES = {0x8664: "x86_64", 0xAA64: "aarch64"}


def check(path: str, machine: str) -> None:
    """Raise unless a file is a complete shared library for a machine such as ``x86_64``.

    Raises:
        LibraryFileError: it is not; the message has the path and the reason.
        OSError: it cannot be read.
    """
    size = Path(path).stat().st_size
    with Path(path).open("rb") as file:
        start = file.read(_DOS_HEADER)
        if not start.startswith(b"MZ"):
            raise _no_library(path)
        if len(start) < _DOS_HEADER:
            raise truncated(path, size, _DOS_HEADER)
        place = int.from_bytes(start[-4:], "little")
        if size < place + _HEADER.size:
            raise truncated(path, size, place + _HEADER.size)
        file.seek(place)
        fields = _HEADER.unpack(file.read(_HEADER.size))
        signature, number, count, _, _, _, optional_size, traits, magic = fields
        if signature != b"PE\0\0" or not traits & _DLL or magic != _64_BITS:
            raise _no_library(path)
        check_machine(path, machine, _MACHINES.get(number), "PE", f"{number:#x}")
        sections = place + _HEADER.size - 2 + optional_size  # the magic is in the optional header
        needed = sections + _SECTION.size * count
        if size < needed:
            raise truncated(path, size, needed)
        file.seek(sections)
        table = file.read(_SECTION.size * count)
    for _, _, _, bytes_in_file, offset in _SECTION.iter_unpack(table):
        needed = max(needed, offset + bytes_in_file)
    if size < needed:
        raise truncated(path, size, needed)


def _no_library(path: str) -> LibraryFileError:
    return LibraryFileError(messages.NO_LIBRARY.format(path=path, system="Windows"))
