# SPDX-License-Identifier: BSD-3-Clause
"""Reads the dependencies and exports of a shared library of Windows with pefile.

delvewheel also uses pefile. It copies libraries into a wheel, but checks nothing.
"""

from __future__ import annotations

import pefile

from release.binaries import Library
from release.project import ReleaseError

MAGIC = b"MZ"
_MACHINES = {0x8664: "x86_64", 0xAA64: "aarch64"}
# Flags of the optional header, each with the weakness of a library that lacks it.
_PROTECTIONS = {
    "IMAGE_DLLCHARACTERISTICS_DYNAMIC_BASE": "is always loaded at the same address",
    "IMAGE_DLLCHARACTERISTICS_HIGH_ENTROPY_VA": "is loaded within the first 4 GB",
    "IMAGE_DLLCHARACTERISTICS_NX_COMPAT": "asks for executable data",
}


def read_portable_executable(content: bytes) -> Library:
    """Read a shared library.

    Raises:
        ReleaseError: the library cannot be read.
    """
    try:
        image = pefile.PE(data=content)
    except pefile.PEFormatError as error:
        raise ReleaseError(f"it cannot be read as a library of Windows: {error}") from error
    number = image.FILE_HEADER.Machine
    imports = [
        entry.dll.decode()
        for kind in ("DIRECTORY_ENTRY_IMPORT", "DIRECTORY_ENTRY_DELAY_IMPORT")
        for entry in getattr(image, kind, ())
    ]
    exports = getattr(image, "DIRECTORY_ENTRY_EXPORT", None)
    return Library(
        machine=_MACHINES.get(number, f"{number:#x}"),
        needed=tuple(imports),
        run_paths=(),
        exports=tuple(sorted(s.name.decode() for s in exports.symbols if s.name))
        if exports
        else (),
        versions={},
        weaknesses=tuple(
            text for flag, text in _PROTECTIONS.items() if not getattr(image.OPTIONAL_HEADER, flag)
        ),
        device_code=frozenset(),
    )
