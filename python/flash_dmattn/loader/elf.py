# SPDX-License-Identifier: BSD-3-Clause
"""Header checks of a Linux shared library before it is opened."""

from __future__ import annotations

import struct
from pathlib import Path

from . import messages
from .errors import LibraryFileError, check_machine, truncated

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<8xQ16xQ16x")  # p_offset and p_filesz
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
        needed = _HEADER.size
        if size >= needed:
            _, _, number, _, _, segments, sections, _, _, *sizes, _ = _HEADER.unpack(start)
            segment_size, segment_count, section_size, section_count = sizes
            check_machine(path, machine, _MACHINES.get(number), "ELF", str(number))
            # Linkers put section headers last, so checking their end detects nearly all truncation.
            ends = segments + segment_size * segment_count, sections + section_size * section_count
            needed = max(ends)
        if size >= needed and segment_size == _SEGMENT.size:
            file.seek(segments)
            table = file.read(segment_size * segment_count)
            needed = max(needed, *(sum(segment) for segment in _SEGMENT.iter_unpack(table)), 0)
    if size < needed:
        raise truncated(path, size, needed)
