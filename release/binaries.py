# SPDX-License-Identifier: BSD-3-Clause
"""Reads shared libraries of Linux with pyelftools: dependencies, exports and device code."""

from __future__ import annotations

import io
import re
import struct
from dataclasses import dataclass
from typing import Any

from elftools.elf.constants import P_FLAGS
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import Symbol, SymbolTableSection

from release.targets import version_numbers

_MACHINES = {"x64": "x86_64", "AArch64": "aarch64"}
_FATBIN_MAGIC = 0xBA55ED50
_FATBIN_KINDS = {1: "compute", 2: "sm"}  # PTX, machine code


@dataclass(frozen=True)
class Library:
    """The properties of a library that gates check.

    Attributes:
        machine: such as ``x86_64``.
        needed: the libraries that it is linked with.
        run_paths: entries of RPATH and RUNPATH.
        exports: names of the defined dynamic symbols.
        versions: the highest symbol version that it needs for each prefix, such as ``GLIBC``; for
            ``macOS``, the oldest system that runs it.
        weaknesses: problems of security or size, each as the end of a sentence about the library.
        device_code: machine code for GPUs, such as ``sm_90``, and PTX, such as ``compute_90``.
    """

    machine: str
    needed: tuple[str, ...]
    run_paths: tuple[str, ...]
    exports: tuple[str, ...]
    versions: dict[str, str]
    weaknesses: tuple[str, ...]
    device_code: frozenset[str]


def read_library(content: bytes) -> Library:
    """Read a shared library of Linux."""
    elf = ELFFile(io.BytesIO(content))
    # Any: the attributes of a tag depend on its kind, which its type does not express.
    dynamic: list[Any] = [tag for s in elf.iter_sections() if isinstance(s, DynamicSection)
                          for tag in s.iter_tags()]  # fmt: skip
    entries = {tag.entry.d_tag: int(tag.entry.d_val) for tag in dynamic}
    paths = [tag.rpath for tag in dynamic if tag.entry.d_tag == "DT_RPATH"]
    paths += [tag.runpath for tag in dynamic if tag.entry.d_tag == "DT_RUNPATH"]
    segments = [(s["p_type"], s["p_flags"]) for s in elf.iter_segments()]
    stacks = [flags for kind, flags in segments if kind == "PT_GNU_STACK"]
    writable_code = P_FLAGS.PF_W | P_FLAGS.PF_X
    fatbin = elf.get_section_by_name(".nv_fatbin")
    weaknesses = {
        "has writable code": any(
            kind == "PT_LOAD" and flags & writable_code == writable_code for kind, flags in segments
        ),
        "has text relocations": "DT_TEXTREL" in entries or entries.get("DT_FLAGS", 0) & 4,
        "asks for an executable stack": not stacks or stacks[0] & P_FLAGS.PF_X,
        "is not linked with -z relro": all(kind != "PT_GNU_RELRO" for kind, _ in segments),
        "is not linked with -z now": not (
            entries.get("DT_FLAGS", 0) & 8 or entries.get("DT_FLAGS_1", 0) & 1
        ),
        "was compiled without a stack protector": "__stack_chk_fail" not in _imports(elf),
        "has debug information; it was not stripped": elf.get_section_by_name(".debug_info"),
    }
    return Library(
        machine=_MACHINES.get(elf.get_machine_arch(), elf.get_machine_arch()),
        needed=tuple(tag.needed for tag in dynamic if tag.entry.d_tag == "DT_NEEDED"),
        run_paths=tuple(entry for path in paths for entry in path.split(":") if entry),
        exports=_exports(elf),
        versions=_versions(elf),
        weaknesses=tuple(text for text, found in weaknesses.items() if found),
        device_code=frozenset() if fatbin is None else _device_code(fatbin.data()),
    )


def _dynamic_symbols(elf: ELFFile) -> list[Symbol]:
    table = elf.get_section_by_name(".dynsym")
    return list(table.iter_symbols()) if isinstance(table, SymbolTableSection) else []


def _exports(elf: ELFFile) -> tuple[str, ...]:
    return tuple(
        sorted(
            symbol.name
            for symbol in _dynamic_symbols(elf)
            if symbol["st_shndx"] not in ("SHN_UNDEF", "SHN_ABS")
            and symbol["st_info"]["bind"] != "STB_LOCAL"
        )
    )


def _imports(elf: ELFFile) -> set[str]:
    return {s.name for s in _dynamic_symbols(elf) if s["st_shndx"] == "SHN_UNDEF"}


def _versions(elf: ELFFile) -> dict[str, str]:
    """Return the highest symbol version of each family that the library needs."""
    highest: dict[str, str] = {}
    for section in elf.iter_sections():
        if not isinstance(section, GNUVerNeedSection):
            continue
        for _, auxiliaries in section.iter_versions():
            for auxiliary in auxiliaries:
                found = re.fullmatch(r"([A-Z]+)_(\d+(?:\.\d+)*)", auxiliary.name)
                if found and version_numbers(found[2]) > version_numbers(
                    highest.get(found[1], "0")
                ):
                    highest[found[1]] = found[2]
    return highest


def _device_code(data: bytes) -> frozenset[str]:
    """Return the targets of the fat binaries in a section .nv_fatbin.

    This needs no CUDA. NVIDIA does not document the format: the magic number, the sizes and the
    fields of an entry are those that CUDA 12.4 to 13.0 write. A test compares them with cuobjdump.
    The result lacks the letter of ``sm_90a``, which only the compressed code contains.
    """
    found = set()
    offset = 0
    while offset + 16 <= len(data):
        magic, _, header_size, size = struct.unpack_from("<IHHQ", data, offset)
        if magic != _FATBIN_MAGIC:
            offset += 8  # alignment between two fat binaries
            continue
        entry, end = offset + header_size, offset + header_size + size
        while entry + 32 <= end:
            kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", data, entry)
            (arch,) = struct.unpack_from("<I", data, entry + 28)
            found.add(f"{_FATBIN_KINDS.get(kind, f'kind{kind}')}_{arch}")
            entry += entry_header + entry_size
        offset = end
    return frozenset(found)
