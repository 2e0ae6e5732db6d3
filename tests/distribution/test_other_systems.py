# SPDX-License-Identifier: BSD-3-Clause
"""Wheels of macOS and Windows: facts of their libraries, and the verdicts of the gates."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from release import targets
from release.binaries import Library
from release.distributions import Wheel
from release.gates import layout, libraries
from release.gates.verdict import Task, read
from release.mach_o import read_mach_o
from release.portable_executable import read_portable_executable
from release.project import ReleaseError
from release.wheel import check_native_tag, native_variables

TABLE = targets.load()
MACOS, WINDOWS = "cp310-abi3-macosx_11_0_arm64", "cp310-abi3-win_amd64"


def command(kind: int, body: bytes) -> bytes:
    body += bytes(-len(body) % 8)
    return struct.pack("<II", kind, 8 + len(body)) + body


def dylib(
    *symbols: tuple[str, int], oldest: int = 11, signed: bool = True, run_path: str = ""
) -> bytes:
    """Return an arm64 library with symbols of these names and types."""
    texts, table = b"\0", b""
    for name, kind in symbols:
        table += struct.pack("<IBBHQ", len(texts), kind, 1, 0, 0)
        texts += name.encode() + b"\0"
    commands = [
        command(0xC, struct.pack("<IIII", 24, 0, 0, 0) + b"/usr/lib/libSystem.B.dylib\0"),
        command(0x32, struct.pack("<IIII", 1, oldest << 16, 0, 0)),
    ]
    if signed:
        commands.append(command(0x1D, bytes(8)))
    if run_path:
        commands.append(command(0x1C | 0x80000000, struct.pack("<I", 12) + run_path.encode()))
    size = 32 + sum(map(len, commands)) + 24
    commands.append(
        struct.pack("<IIIIII", 2, 24, size, len(symbols), size + len(table), len(texts))
    )
    content = b"".join(commands)
    head = struct.pack("<IIIIIIII", 0xFEEDFACF, 0x0100000C, 0, 8, len(commands), len(content), 0, 0)
    return head + content + table + texts


def dll(protections: int = 0x160, needed: bytes = b"KERNEL32.dll") -> bytes:
    """Return an x86_64 library of one section with an import and an export."""
    place = 0x1000  # of the section in memory; its file offset is 0x200
    imports = struct.pack("<IIIII", place + 0x80, 0, 0, place + 0x60, place + 0x80) + bytes(20)
    exports = struct.pack(
        "<IIHHIIIIIII", 0, 0, 0, 0, place + 0x120, 1, 1, 1, place + 0x110, place + 0x114, 0
    )
    exports = exports[:36] + struct.pack("<I", place + 0x118)
    section = bytearray(0x400)
    section[0 : len(imports)] = imports
    section[0x60 : 0x60 + len(needed)] = needed
    section[0x80:0x90] = struct.pack("<QQ", place + 0xA0, 0)
    section[0xA0:0xAF] = b"\0\0GetLastError\0"
    section[0xC0 : 0xC0 + len(exports)] = exports
    section[0x110:0x11A] = struct.pack("<IIH", place + 0x180, place + 0x130, 0)
    section[0x120:0x128] = b"pack.dll"
    section[0x130:0x142] = b"flash_dmattn_pack\0"
    optional = struct.pack("<HBBIIIII", 0x20B, 14, 0, 0x400, 0, 0, 0, place)
    optional += struct.pack("<QIIHHHHHHIIII", 0x180000000, 0x1000, 0x200, 6, 0, 0, 0, 6, 0, 0,
                            0x2000, 0x200, 0)  # fmt: skip
    optional += struct.pack("<HHQQQQII", 2, protections, 1 << 20, 4096, 1 << 20, 4096, 0, 16)
    optional += struct.pack("<IIII", place + 0xC0, 0xA0, place, 40) + bytes(14 * 8)
    header = struct.pack("<4sHHIIIHH", b"PE\0\0", 0x8664, 1, 0, 0, 0, len(optional), 0x2022)
    table = struct.pack(
        "<8sIIIIIIHHI", b".text", 0x400, place, 0x400, 0x200, 0, 0, 0, 0, 0x60000020
    )
    start = b"MZ" + bytes(58) + (64).to_bytes(4, "little") + header + optional + table
    return start.ljust(0x200, b"\0") + bytes(section)


PACK = ("_flash_dmattn_pack", 0x0F)


def test_a_library_of_macos_is_read() -> None:
    hidden = [("_hidden", 0x0E), ("_private", 0x1F), ("_malloc", 0x01), ("_line", 0x64)]
    assert read(dylib(PACK, *hidden, run_path="@loader_path")) == Library(
        machine="aarch64",
        needed=("/usr/lib/libSystem.B.dylib",),
        run_paths=("@loader_path",),
        exports=("flash_dmattn_pack",),
        versions={"macOS": "11.0"},
        weaknesses=(),
        device_code=frozenset(),
    )


def test_a_library_of_windows_is_read() -> None:
    assert read(dll()) == Library(
        machine="x86_64",
        needed=("KERNEL32.dll",),
        run_paths=(),
        exports=("flash_dmattn_pack",),
        versions={},
        weaknesses=(),
        device_code=frozenset(),
    )


def test_what_is_no_library_is_an_error() -> None:
    with pytest.raises(ReleaseError, match="Mach-O"):
        read_mach_o(dylib(PACK)[:100])
    with pytest.raises(ReleaseError, match="library of Windows"):
        read_portable_executable(b"MZ" + bytes(100))


def wheel_of(tag: str, pack: bytes) -> Wheel:
    wheel = Wheel(Path(f"flash_dmattn-2.0.0a1-{tag}.whl"), {})
    return replace(wheel, contents={wheel.cpu_pack: pack, wheel.core: core_of(tag)})


def core_of(tag: str) -> bytes:
    if tag == WINDOWS:
        return dll().replace(b"flash_dmattn_pack\0", b"PyInit__core\0\0\0\0\0\0")
    return dylib(("_PyInit__core", 0x0F))


def complaints(tag: str, pack: bytes) -> list[str]:
    task = Task(wheel_of(tag, pack), TABLE, manylinux=False, complete=False)
    gates = (libraries.needed, libraries.symbol_versions, libraries.run_path, libraries.exports)
    return [
        text for gate in (*gates, libraries.hardening, libraries.machine) for text in gate(task)
    ]


@pytest.mark.parametrize("tag, pack", [(MACOS, dylib(PACK)), (WINDOWS, dll())])
def test_a_good_library_passes_every_gate(tag: str, pack: bytes) -> None:
    assert complaints(tag, pack) == []


@pytest.mark.parametrize(
    "tag, pack, complaint",
    [
        (MACOS, dylib(PACK, ("__Znwm", 0x0F)), "exports 2 symbols"),
        (MACOS, dylib(PACK, oldest=14), "needs macOS 14.0; the tag is macosx_11_0_"),
        (MACOS, dylib(PACK, signed=False), "has no signature"),
        (MACOS, dylib(PACK, run_path="/opt/lib"), "has the run path /opt/lib"),
        (WINDOWS, dll(needed=b"MSVCP140.dll"), "needs MSVCP140.dll"),
        (WINDOWS, dll(protections=0x60), "asks for executable data"),
        (WINDOWS, dll(protections=0x120), "is always loaded at the same address"),
        (WINDOWS, dylib(PACK), "is for aarch64, the tag says x86_64"),
    ],
)
def test_a_bad_library_fails(tag: str, pack: bytes, complaint: str) -> None:
    assert any(complaint in text for text in complaints(tag, pack))


@pytest.mark.parametrize(
    "tag, system, machine, core, pack",
    [
        (MACOS, "macos", "aarch64", "_core.abi3.so", "packs/libflash_dmattn_cpu.dylib"),
        (WINDOWS, "windows", "x86_64", "_core.pyd", "packs/flash_dmattn_cpu.dll"),
        (
            "cp310-abi3-linux_aarch64",
            "linux",
            "aarch64",
            "_core.abi3.so",
            "packs/libflash_dmattn_cpu.so",
        ),
    ],
)
def test_a_tag_tells_the_names_of_files(
    tag: str, system: str, machine: str, core: str, pack: str
) -> None:
    wheel = Wheel(Path(f"flash_dmattn-2.0.0a1-{tag}.whl"), {})
    assert (wheel.system, wheel.machine) == (system, machine)
    assert (wheel.core, wheel.cpu_pack) == (f"flash_dmattn/{core}", f"flash_dmattn/{pack}")
    assert wheel.is_pack(wheel.cpu_pack)
    assert not wheel.is_pack(wheel.core)


@pytest.mark.parametrize("tag", [MACOS, WINDOWS, "cp310-abi3-macosx_10_9_x86_64"])
def test_only_tags_of_the_table_pass(tag: str) -> None:
    wheel = wheel_of(tag, b"")
    info = "flash_dmattn-2.0.0a1.dist-info"
    wheel.contents[f"{info}/WHEEL"] = f"Tag: {tag}\n".encode()
    wheel.contents[f"{info}/METADATA"] = b"Version: 2.0.0a1\n"
    found = list(layout.tag(Task(wheel, TABLE, manylinux=False, complete=False)))
    if tag in (MACOS, WINDOWS):
        assert found == []
        check_native_tag(wheel)
    else:
        assert any("the tag is cp310-abi3-macosx_10_9_x86_64" in text for text in found)
        with pytest.raises(ReleaseError, match="the table has macosx_11_0_arm64, win_amd64"):
            check_native_tag(wheel)


def test_builds_are_told_what_the_system_needs() -> None:
    assert native_variables("darwin") == {"MACOSX_DEPLOYMENT_TARGET": "11.0"}
    assert native_variables("win32")["CXX"] == "clang++"
    with pytest.raises(ReleaseError, match="not for linux"):
        native_variables("linux")
