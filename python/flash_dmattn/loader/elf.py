# SPDX-License-Identifier: BSD-3-Clause
"""What the headers of a shared library of Linux tell before it is opened."""

from __future__ import annotations

import struct
from pathlib import Path

from . import messages
from .errors import LibraryFileError, truncated

__all__ = ["check"]

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_IDENTITY = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_MACHINES = {62: "x86_64", 183: "aarch64"}  # e_machine


def check(path: str, machine: str) -> None:
    """Raise unless a file is a complete shared library for a machine such as ``x86_64``.

    Raises:
        LibraryFileError: it is not; the message has the path and the reason.
        OSError: it cannot be read.
    """
    size = Path(path).stat().st_size
    with Path(path).open("rb") as file:
        start = file.read(_HEADER.size)
        if not start.startswith(_IDENTITY):
            raise LibraryFileError(messages.NO_LIBRARY.format(path=path, system="Linux"))
        if len(start) < _HEADER.size:
            raise truncated(path, size, _HEADER.size)
        fields = _HEADER.unpack(start)
        number, segments, sections = fields[2], fields[5], fields[6]
        segment_size, segment_count, section_size, section_count = fields[9:13]
        built = _MACHINES.get(number, messages.UNKNOWN_MACHINE.format(form="ELF", number=number))
        if built != machine:
            raise LibraryFileError(
                messages.FOREIGN_LIBRARY.format(path=path, built=built, machine=machine)
            )
        # Linkers put the section headers last, so that they alone tell of nearly every cut.
        needed = max(
            segments + segment_size * segment_count, sections + section_size * section_count
        )
        if size < needed:
            raise truncated(path, size, needed)
        file.seek(segments)
        table = file.read(segment_size * segment_count)
    if segment_size == _SEGMENT.size:
        for _, _, offset, _, _, bytes_in_file, _, _ in _SEGMENT.iter_unpack(table):
            needed = max(needed, offset + bytes_in_file)
    if size < needed:
        raise truncated(path, size, needed)
