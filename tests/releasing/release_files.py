# SPDX-License-Identifier: BSD-3-Clause
"""Small wheels and sdists for the tests of releases."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

VERSION = "2.0.0"
CORE = b"the extension module"
CU13 = {
    "name": "cu13-sm90",
    "file": "libcu13.so",
    "cuda": "13.0",
    "arch": "sm90",
    "sha256": "a" * 64,
}
CU12 = {
    "name": "cu12-sm80",
    "file": "libcu12.so",
    "cuda": "12.9",
    "arch": "sm80",
    "sha256": "b" * 64,
}
CPU = {"name": "cpu", "file": "libcpu.so", "cuda": None, "arch": None, "sha256": "c" * 64}


def metadata_text(version: str, name: str = "flash-dmattn") -> str:
    return f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\nRequires-Python: >=3.10\n"


def make_wheel(
    folder: Path,
    version: str = VERSION,
    machine: str = "x86_64",
    packs: tuple[dict[str, Any], ...] = (CPU, CU13),
    stem: str = "flash_dmattn",
    metadata_version: str | None = None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}-{version}-py3-none-any.whl"
    if machine:
        path = folder / f"{stem}-{version}-cp310-abi3-manylinux_2_28_{machine}.whl"
    tag = "-".join(path.stem.split("-")[2:])
    info = f"{stem}-{version}.dist-info"
    name = stem.replace("_", "-")
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{stem}/__init__.py", f'version = "{version}"\n')
        if machine:
            wheel.writestr(f"{stem}/_core.abi3.so", CORE)
        wheel.writestr(f"{stem}/packs/manifest.json", json.dumps({"schema": 1, "packs": packs}))
        wheel.writestr(f"{info}/METADATA", metadata_text(metadata_version or version, name))
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        wheel.writestr(
            f"{info}/RECORD",
            "".join(f"{entry},,\n" for entry in [*wheel.namelist(), f"{info}/RECORD"]),
        )
    return path


def make_sdist(folder: Path, version: str = VERSION) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"flash_dmattn-{version}.tar.gz"
    content = metadata_text(version).encode()
    member = tarfile.TarInfo(f"flash_dmattn-{version}/PKG-INFO")
    member.size = len(content)
    with tarfile.open(path, "w:gz") as sdist:
        sdist.addfile(member, io.BytesIO(content))
    return path
