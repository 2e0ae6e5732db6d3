# SPDX-License-Identifier: BSD-3-Clause
"""Header checks of a macOS shared library before it is opened.

The parser is our own, because only the standard library is required at run time.
"""

from __future__ import annotations

import struct
from pathlib import Path

from . import messages
from .errors import LibraryFileError, check_machine, truncated

_HEADER = struct.Struct("<IIIIIIII")
_COMMAND = struct.Struct("<II")
_SEGMENT = struct.Struct("<16sQQQQ")  # after the command's head: name, then address and size twice
_MAGIC = 0xFEEDFACF  # 64 bits, one machine
_SEGMENT_64 = 0x19
_MACHINES = {0x01000007: "x86_64", 0x0100000C: "aarch64"}  # cputype


def check(path: str, machine: str) -> None:
    """Raise unless a file is a complete shared library for a machine such as ``aarch64``.

    Raises:
        LibraryFileError: it is not; the message has the path and the reason.
        OSError: it cannot be read.
    """
    size = Path(path).stat().st_size
    with Path(path).open("rb") as file:
        start = file.read(_HEADER.size)
        if int.from_bytes(start[:4], "little") != _MAGIC:
            raise LibraryFileError(messages.NO_LIBRARY.format(path=path, system="macOS"))
        if len(start) < _HEADER.size:
            raise truncated(path, size, _HEADER.size)
        _, number, _, _, count, bytes_of_commands, _, _ = _HEADER.unpack(start)
        check_machine(path, machine, _MACHINES.get(number), "Mach-O", f"{number:#x}")
        commands = file.read(bytes_of_commands)
    needed = _HEADER.size + bytes_of_commands
    offset = 0
    while size >= needed and count > 0 and offset + _COMMAND.size <= len(commands):
        kind, command_size = _COMMAND.unpack_from(commands, offset)
        if kind == _SEGMENT_64 and offset + _COMMAND.size + _SEGMENT.size <= len(commands):
            segment = _SEGMENT.unpack_from(commands, offset + _COMMAND.size)
            needed = max(needed, segment[3] + segment[4])
        offset += max(command_size, _COMMAND.size)
        count -= 1
    if size < needed:
        raise truncated(path, size, needed)
