# SPDX-License-Identifier: BSD-3-Clause
"""Which machine code a pack holds for GPUs."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

from elftools.elf.elffile import ELFFile

__all__ = ["cuobjdump_version", "fatbin_code", "find_cuobjdump", "listed_code"]

_MAGIC = 0xBA55ED50
_KINDS = {1: "compute", 2: "sm"}  # PTX, machine code


def find_cuobjdump() -> str | None:
    """Return CUDA's program, from PATH or the folder of a toolkit."""
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = ["cuobjdump", *(f"{folder}/bin/cuobjdump" for folder in toolkits if folder)]
    return next((found for place in places if (found := shutil.which(place))), None)


def cuobjdump_version(cuobjdump: str) -> str:
    """Return the CUDA version of a cuobjdump, such as ``13.0``; ``0`` if it does not tell."""
    text = subprocess.run([cuobjdump, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"release (\d+\.\d+)", text.stdout)
    return found[1] if found else "0"


def listed_code(cuobjdump: str, library: Path) -> set[str]:
    """Return what cuobjdump finds, such as ``sm_90a``; PTX as ``compute_90a``."""
    found = set()
    for option, prefix in (("--list-elf", "sm"), ("--list-ptx", "compute")):
        done = subprocess.run(
            [cuobjdump, option, library], capture_output=True, text=True, check=False
        )
        # Without any, it complains and fails.
        names = re.findall(r"\.sm_(\d+[af]?)\.", done.stdout)
        found |= {f"{prefix}_{number}" for number in names}
    return found


def fatbin_code(library: Path) -> set[str]:
    """Return what the section .nv_fatbin names, such as ``sm_90``; PTX as ``compute_90``.

    For machines without CUDA. NVIDIA documents no format: the magic number, the sizes and the
    fields of an entry are those that CUDA 12.4 to 13.0 write, which a test compares with cuobjdump.
    The letter of ``sm_90a`` stands in the code itself, which is compressed, and so is left out.
    """
    with library.open("rb") as file:
        section = ELFFile(file).get_section_by_name(".nv_fatbin")
        data = b"" if section is None else section.data()
    found = set()
    offset = 0
    while offset + 16 <= len(data):
        magic, _, header_size, size = struct.unpack_from("<IHHQ", data, offset)
        if magic != _MAGIC:
            offset += 8  # alignment between two fat binaries
            continue
        entry, end = offset + header_size, offset + header_size + size
        while entry + 32 <= end:
            kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", data, entry)
            (arch,) = struct.unpack_from("<I", data, entry + 28)
            found.add(f"{_KINDS.get(kind, f'kind{kind}')}_{arch}")
            entry += entry_header + entry_size
        offset = end
    return found
