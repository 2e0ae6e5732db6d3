# SPDX-License-Identifier: BSD-3-Clause
"""A small wheel of this project: every gate passes it, and each test spoils it in one way."""

from __future__ import annotations

import base64
import hashlib
import json
import platform
import shutil
import struct
import subprocess
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from release import targets
from release.project import ROOT, abi_version, pyproject_value
from release.sbom import BILL, bill_of_libraries

MACHINE = platform.machine()
VERSION = pyproject_value("version")
INFO = f"flash_dmattn-{VERSION}.dist-info"
CPU_FILE = "flash_dmattn/packs/libflash_dmattn_cpu.so"
GPU_FILE = "flash_dmattn/packs/libflash_dmattn_cu13_sm90.so"
CORE_FILE = "flash_dmattn/_core.abi3.so"
BILL_FILE = f"{INFO}/sboms/{BILL}"
LINUX, MANYLINUX = f"linux_{MACHINE}", f"{targets.load().wheel.policy}_{MACHINE}"

# auditwheel can only tell the library's platform from a used libc symbol. The stack array gives the
# stack protector something to protect.
PACK = """
#include <stdlib.h>
__attribute__((visibility("default"))) void *flash_dmattn_pack(void) {
  char name[] = "HOME";
  return getenv(name);
}
"""
CORE = """
#include <stdlib.h>
extern void *PyModuleDef_Init(void *definition);
__attribute__((visibility("default"))) void *PyInit__core(void) {
  static char definition[256];
  char name[] = "HOME";
  return getenv(name) ? PyModuleDef_Init(definition) : 0;
}
"""


def compiler() -> str | None:
    """Return the system's C compiler, or None."""
    return shutil.which("cc") or shutil.which("gcc")


def compile_library(source: str, path: Path, flags: Sequence[str] = ()) -> bytes:
    """Compile C to a stripped shared library with the project's link options."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.with_suffix(".c")
    file.write_text(source)
    command = [compiler() or "cc", "-O1", "-fPIC", "-shared", "-fvisibility=hidden"]
    command += ["-fstack-protector-strong"]
    command += ["-Wl,-z,relro,-z,now,-z,noexecstack", "-o", str(path), str(file), *flags]
    command += [] if "-g" in flags else ["-s"]
    subprocess.run(command, check=True)
    return path.read_bytes()


def fat_binary(*entries: tuple[int, int]) -> str:
    """Return C that places a fat binary of (kind, arch) entries in nvcc's section."""
    content = b""
    for kind, arch in entries:
        header = struct.pack("<HHIQ", kind, 0x101, 64, 8) + bytes(12) + struct.pack("<I", arch)
        content += header.ljust(64, b"\0") + b"machine."
    content = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content
    listed = ", ".join(map(str, content))
    return (
        '__attribute__((used, section(".nv_fatbin"), aligned(8)))\n'
        f"static const unsigned char fat_binary[] = {{{listed}}};\n"
    )


@dataclass
class SmallWheel:
    """The content of a wheel; edit it, then `save`.

    Attributes:
        files: content by path, all but the manifest and RECORD.
        packs: rows of the manifest. Hashes and sizes default to those of the files.
        head: other members of the manifest.
        tag: of the WHEEL file.
        workspace: for libraries that a test compiles.
    """

    files: dict[str, bytes]
    packs: list[dict[str, Any]]
    workspace: Path
    head: dict[str, Any] = field(
        default_factory=lambda: {"schema": 1, "version": VERSION, "abi_version": abi_version()}
    )
    tag: str = f"cp310-abi3-{LINUX}"

    def replace_library(self, path: str, source: str, *flags: str) -> None:
        """Compile another library for a path of the wheel."""
        self.files[path] = compile_library(source, self.workspace / Path(path).name, flags)

    def edit(self, path: str, old: str, new: str) -> None:
        """Replace text of a file."""
        text = self.files[path].decode()
        assert old in text
        self.files[path] = text.replace(old, new).encode()

    def row(self, name: str) -> dict[str, Any]:
        """Return a pack's row of the manifest."""
        return next(row for row in self.packs if row["name"] == name)

    def add_pack(self, name: str, source: str, **changes: Any) -> None:
        """Add a pack with the manifest row that the build would write."""
        file = f"libflash_dmattn_{name.replace('-', '_')}.so"
        self.replace_library(f"flash_dmattn/packs/{file}", source)
        self.packs.append(describe(name, file) | changes)

    def save(self, folder: Path, tag: str | None = None) -> Path:
        """Write the wheel under a name with the tag, and return its path."""
        rows = []
        for row in self.packs:
            content = self.files.get(f"flash_dmattn/packs/{row['file']}", b"")
            facts = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
            rows.append(facts | row)
        manifest = json.dumps(self.head | {"packs": rows}).encode()
        cores = {path: self.files[path] for path in (CORE_FILE,) if path in self.files}
        bill = bill_of_libraries("flash-dmattn", VERSION, cores, rows)
        files = {
            BILL_FILE: json.dumps(bill).encode(),
            **self.files,
            "flash_dmattn/packs/manifest.json": manifest,
            f"{INFO}/WHEEL": (
                f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: false\nTag: {self.tag}\n\n"
            ).encode(),
        }
        record = "".join(
            f"{path},sha256={_digest(content)},{len(content)}\n" for path, content in files.items()
        )
        files[f"{INFO}/RECORD"] = f"{record}{INFO}/RECORD,,\n".encode()
        path = folder / f"flash_dmattn-{VERSION}-{tag or self.tag}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return path


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


def describe(name: str, file: str) -> dict[str, Any]:
    """Return a pack's row of the manifest without the fields that depend on the file."""
    row: dict[str, Any] = {"name": name, "file": file, "machine": MACHINE, "commit": "c" * 40}
    if name == "cpu":
        nothing = dict.fromkeys(["cuda", "arch", "min_driver", "head_dims", "kernels"])
        return row | {"device": "cpu", "code": []} | nothing
    major, arch = name.removeprefix("cu").split("-")
    table = json.loads((ROOT / "cmake" / "targets.json").read_text())
    drivers = (of.get("min_driver", "0") for of in (table["cuda"][major], table["archs"][arch]))
    return row | {
        "device": "cuda",
        "cuda": table["cuda"][major]["min_toolkit"],
        "arch": arch,
        "code": [f"sm_{table['archs'][arch]['code']}"],
        "min_driver": max(drivers, key=targets.version_numbers),
        "head_dims": [64],
        "kernels": "a" * 64,
    }


def good_wheel(workspace: Path) -> SmallWheel:
    """Return a valid wheel with the cpu pack and one GPU pack."""
    metadata = (
        f"Metadata-Version: 2.4\nName: flash-dmattn\nVersion: {VERSION}\nSummary: small\n"
        "License-Expression: BSD-3-Clause\nLicense-File: LICENSE\n"
        "License-File: LICENSE.cuda-runtime\n"
        "Description-Content-Type: text/markdown\n\n# A small wheel\n"
    )
    files = {
        "flash_dmattn/__init__.py": b'"""Small."""\n',
        "flash_dmattn/py.typed": b"",
        "flash_dmattn/targets.json": (ROOT / "cmake" / "targets.json").read_bytes(),
        f"{INFO}/METADATA": metadata.encode(),
        f"{INFO}/licenses/LICENSE": (ROOT / "LICENSE").read_bytes(),
        f"{INFO}/licenses/LICENSE.cuda-runtime": (ROOT / "LICENSE.cuda-runtime").read_bytes(),
    }
    wheel = SmallWheel(files, [], workspace)
    wheel.replace_library(CORE_FILE, CORE)
    wheel.add_pack("cpu", PACK)
    wheel.add_pack("cu13-sm90", fat_binary((2, 90)) + PACK)
    return wheel


def link_to(wheel: SmallWheel, path: str, soname: str, version: str = "") -> None:
    """Link a library of the wheel to another library's function with a symbol version."""
    folder = wheel.workspace / "stub"
    script = folder / "version.map"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(f"{version or 'STUB_1.0'} {{ global: stub_function; }};\n")
    stub = folder / "libstub.so"
    compile_library(
        '__attribute__((visibility("default"))) void stub_function(void) {}\n',
        stub,
        [f"-Wl,-soname,{soname}", f"-Wl,--version-script={script}"],
    )
    call = "extern void stub_function(void);\nvoid *use_stub = (void *)stub_function;\n"
    own = CORE if path == CORE_FILE else PACK
    use = own.replace("getenv(", "stub_function(), getenv(")
    wheel.replace_library(path, call + use, str(stub))
