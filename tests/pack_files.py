# SPDX-License-Identifier: BSD-3-Clause
"""Files that tests open as kernel packs: compiled and damaged ones, and wheels of packs."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import shutil
import subprocess
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import flash_dmattn
from flash_dmattn import _core
from flash_dmattn.loader import pack_for

HEADERS = Path(__file__).parent.parent / "cpp"
MACHINE_OFFSET = 18  # of e_machine in an ELF file


def real_pack() -> Path:
    """Return the cpu pack of the installation under test."""
    return Path(pack_for("cpu").path)


def package_files() -> dict[str, bytes]:
    """Return the package's files without packs, by their names in a wheel."""
    files: dict[str, bytes] = {}
    for directory in map(Path, flash_dmattn.__path__):
        for path in directory.rglob("*"):
            inside = path.relative_to(directory)
            if path.is_file() and "__pycache__" not in path.parts and inside.parts[0] != "packs":
                files[f"flash_dmattn/{inside.as_posix()}"] = path.read_bytes()
    return files


def listed_pack(name: str, content: bytes) -> dict[str, Any]:
    """Return the manifest's row of a pack."""
    major, _, arch = name.removeprefix("cu").partition("-")
    gpu = name != "cpu"
    return {
        "name": name,
        "file": f"libflash_dmattn_{name.replace('-', '_')}.so",
        "device": "cuda" if gpu else "cpu",
        "machine": platform.machine(),
        "cuda": f"{major}.0" if gpu else None,
        "arch": arch or None,
        "min_driver": "525.60.13" if gpu else None,
        "sha256": hashlib.sha256(content).hexdigest(),
        "size": len(content),
    }


def compile_library(source: str, path: Path, *flags: str) -> Path:
    """Compile C to a shared library; skip the test where there is no compiler."""
    compiler = next(filter(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang")), None)
    if compiler is None:
        pytest.skip("no C compiler")
    code = path.with_suffix(".c")
    code.write_text(source)
    common = ["-std=c11", "-shared", "-fPIC", f"-I{HEADERS}"]
    subprocess.run([compiler, *common, code, *flags, "-o", path], check=True)
    return path


def compile_table(fields: str, path: Path) -> Path:
    """Compile a library whose table has these fields in addition to the required ones."""
    return compile_library(
        f"""
        #include "pack.h"
        const fdm_pack *flash_dmattn_pack(void) {{
          static const fdm_pack table = {{
            .abi_version = FDM_PACK_ABI_VERSION, .struct_size = sizeof(fdm_pack), {fields}}};
          return &table;
        }}""",
        path,
    )


def write_foreign(path: Path, machine: int) -> Path:
    """Write the cpu pack with the header of another machine."""
    content = bytearray(real_pack().read_bytes())
    content[MACHINE_OFFSET : MACHINE_OFFSET + 2] = machine.to_bytes(2, "little")
    path.write_bytes(content)
    return path


def write_manifest(folder: Path, *rows: dict[str, object], **changes: object) -> Path:
    """Write the manifest of a folder of packs, as a build does."""
    content = {
        "schema": 1,
        "version": metadata.version("flash-dmattn"),
        "abi_version": _core.PACK_ABI_VERSION,
        "packs": rows,
        **changes,
    }
    path = folder / "manifest.json"
    path.write_text(json.dumps(content))
    return path


def manifest_row(path: Path, machine: str, **changes: object) -> dict[str, object]:
    """Return the manifest's row of a cpu pack."""
    content = path.read_bytes()
    return {
        "name": "cpu",
        "file": path.name,
        "device": "cpu",
        "machine": machine,
        "cuda": None,
        "arch": None,
        "sha256": hashlib.sha256(content).hexdigest(),
        "size": len(content),
        **changes,
    }


def build_wheel(folder: Path, name: str, version: str, package: Path, entry_points: str) -> Path:
    """Write a wheel with one package folder and these entry points."""
    dist_info = f"{name.replace('-', '_')}-{version}.dist-info"
    files = {
        f"{package.name}/{path.relative_to(package)}": path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file()
    }
    files[f"{dist_info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    )
    files[f"{dist_info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    files[f"{dist_info}/entry_points.txt"] = entry_points.encode()
    record = [
        f"{path},sha256={_unpadded(hashlib.sha256(content).digest())},{len(content)}"
        for path, content in files.items()
    ]
    files[f"{dist_info}/RECORD"] = "\n".join([*record, f"{dist_info}/RECORD,,", ""]).encode()
    wheel = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return wheel


def _unpadded(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
