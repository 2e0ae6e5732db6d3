# SPDX-License-Identifier: BSD-3-Clause
"""Libraries of macOS and Windows, judged by their headers on any system."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from flash_dmattn.loader import macho, pe
from flash_dmattn.loader.errors import LibraryFileError

MACH_O_ARM64, MACH_O_X86_64 = 0x0100000C, 0x01000007
PE_X86_64, PE_ARM64 = 0x8664, 0xAA64
CONTENT = 4096  # bytes after the headers


def mach_o(machine: int = MACH_O_ARM64, magic: int = 0xFEEDFACF) -> bytes:
    """Return a bundle of two load commands: an identifier and a segment up to the end."""
    identifier = struct.pack("<II", 0x1B, 24) + bytes(16)
    size = 32 + 72 + len(identifier)
    segment = struct.pack("<II16sQQQQ", 0x19, 72, b"__LINKEDIT", 0, CONTENT, size, CONTENT)
    segment += bytes(72 - len(segment))
    header = struct.pack("<IIIIIIII", magic, machine, 0, 8, 2, len(identifier) + 72, 0, 0)
    return header + identifier + segment + bytes(CONTENT)


def portable(machine: int = PE_X86_64, magic: int = 0x20B, traits: int = 0x2022) -> bytes:
    """Return a library of one section that extends to the end."""
    optional = struct.pack("<H", magic) + bytes(110)
    start = 128
    size = start + 24 + len(optional) + 40
    header = struct.pack("<4sHHIIIHH", b"PE\0\0", machine, 1, 0, 0, 0, len(optional), traits)
    section = struct.pack("<8sIIII16x", b".text", CONTENT, 4096, CONTENT, size)
    dos = b"MZ" + bytes(58) + start.to_bytes(4, "little")
    return dos + bytes(start - len(dos)) + header + optional + section + bytes(CONTENT)


Check = Callable[[str, str], None]
FORMS: list[tuple[Check, str, bytes]] = [
    (macho.check, "aarch64", mach_o()),
    (pe.check, "x86_64", portable()),
]
forms = pytest.mark.parametrize("check, machine, content", FORMS, ids=["mach-o", "pe"])


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return tmp_path / "library"


@forms
def test_a_whole_library_passes(library: Path, check: Check, machine: str, content: bytes) -> None:
    library.write_bytes(content)
    check(str(library), machine)


@forms
@pytest.mark.parametrize("part", [0.002, 0.008, 0.02, 0.03, 0.25, 0.75, 0.9999])
def test_a_file_that_was_cut_off_is_refused(
    library: Path, check: Check, machine: str, content: bytes, part: float
) -> None:
    library.write_bytes(content[: int(len(content) * part)])
    with pytest.raises(LibraryFileError, match=r"it is truncated: it has \d+ bytes"):
        check(str(library), machine)


@forms
@pytest.mark.parametrize("content_", [b"", b"not a library", b"\x7fELF\x02\x01" + bytes(200)])
def test_other_files_are_refused(
    library: Path, check: Check, machine: str, content: bytes, content_: bytes
) -> None:
    library.write_bytes(content_)
    with pytest.raises(LibraryFileError, match=r"it is no shared library of a 64-bit \w+"):
        check(str(library), machine)


@pytest.mark.parametrize(
    "check, content, built, machine",
    [
        (macho.check, mach_o(MACH_O_X86_64), "x86_64", "aarch64"),
        (macho.check, mach_o(0x12), "Mach-O machine 0x12", "aarch64"),
        (pe.check, portable(PE_ARM64), "aarch64", "x86_64"),
        (pe.check, portable(0x14C), "PE machine 0x14c", "x86_64"),
    ],
)
def test_another_machine_is_named(
    library: Path, check: Check, content: bytes, built: str, machine: str
) -> None:
    library.write_bytes(content)
    with pytest.raises(LibraryFileError, match=f"built for {built}, this machine is {machine}"):
        check(str(library), machine)


@pytest.mark.parametrize(
    "check, content",
    [
        (macho.check, mach_o(magic=0xFEEDFACE)),  # 32 bits
        (macho.check, b"\xca\xfe\xba\xbe" + bytes(200)),  # several architectures
        (pe.check, portable(magic=0x10B)),  # 32 bits
        (pe.check, portable(traits=0x22)),  # an executable
        (pe.check, portable().replace(b"PE\0\0", b"NE\0\0", 1)),
    ],
)
def test_related_files_are_refused(library: Path, check: Check, content: bytes) -> None:
    library.write_bytes(content)
    with pytest.raises(LibraryFileError, match="it is no shared library"):
        check(str(library), "x86_64")


@forms
def test_headers_of_nonsense_end(library: Path, check: Check, machine: str, content: bytes) -> None:
    """Commands of size 0 and counts beyond the file end with an answer instead of a loop."""
    for byte in range(12, min(len(content), 300)):
        changed = bytearray(content)
        changed[byte] ^= 0xFF
        library.write_bytes(changed)
        with contextlib.suppress(LibraryFileError):
            check(str(library), machine)
