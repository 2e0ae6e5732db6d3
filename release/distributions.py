# SPDX-License-Identifier: BSD-3-Clause
"""Reads the names, the metadata and the content of wheels and sdists."""

from __future__ import annotations

import email
import hashlib
import json
import re
import tarfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from email.message import Message
from functools import cached_property
from pathlib import Path
from typing import Any

from release.project import ReleaseError

PACKAGE = "flash_dmattn"


@dataclass(frozen=True)
class Wheel:
    """A wheel's file, and its content by path."""

    path: Path
    contents: dict[str, bytes]

    @classmethod
    def read(cls, path: Path) -> Wheel:
        """Unpack a wheel into memory."""
        try:
            with zipfile.ZipFile(path) as archive:
                names = sorted(name for name in archive.namelist() if not name.endswith("/"))
                return cls(path, {name: archive.read(name) for name in names})
        except (OSError, zipfile.BadZipFile) as error:
            raise ReleaseError(f"{path} cannot be unpacked: {error}") from error

    @property
    def tag(self) -> str:
        """The tag in the file's name, such as ``cp310-abi3-linux_x86_64``."""
        return "-".join(self.path.name.removesuffix(".whl").split("-")[-3:])

    @property
    def manylinux(self) -> bool:
        """Whether the file's name has a manylinux tag."""
        return "manylinux" in self.tag

    @property
    def machine(self) -> str:
        """The machine in the file's name, such as ``x86_64``."""
        found = re.search(r"(x86_64|amd64|aarch64|arm64)$", self.tag)
        if not found:
            return self.tag.rpartition("-")[2]
        return {"amd64": "x86_64", "arm64": "aarch64"}.get(found[1], found[1])

    @property
    def system(self) -> str:
        """The system in the file's name: ``linux``, ``macos`` or ``windows``."""
        platform = self.tag.rpartition("-")[2]
        known = {"win": "windows", "macosx": "macos"}
        return known.get(platform.partition("_")[0], "linux")

    @property
    def core(self) -> str:
        """The path of the extension module on the wheel's system."""
        return f"{PACKAGE}/_core.{'pyd' if self.system == 'windows' else 'abi3.so'}"

    @property
    def cores(self) -> dict[str, bytes]:
        """The extension module by its path; empty in a wheel of packs only."""
        return {name: self.contents[name] for name in (self.core,) if name in self.contents}

    @property
    def cpu_pack(self) -> str:
        """The path of the cpu pack on the wheel's system."""
        names = {
            "linux": "libflash_dmattn_cpu.so",
            "macos": "libflash_dmattn_cpu.dylib",
            "windows": "flash_dmattn_cpu.dll",
        }
        return f"{PACKAGE}/packs/{names[self.system]}"

    @cached_property
    def dist_info(self) -> str:
        """The name of the folder with the metadata."""
        folders = {name.partition("/")[0] for name in self.contents}
        found = [name for name in folders if name.endswith(".dist-info")]
        if len(found) != 1:
            raise ReleaseError(f"{self.path.name} has {len(found)} .dist-info folders, not one")
        return found[0]

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The content of packs/manifest.json."""
        try:
            content = json.loads(self.contents[f"{PACKAGE}/packs/manifest.json"])
        except (KeyError, ValueError) as error:
            raise ReleaseError(f"packs/manifest.json cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise ReleaseError("packs/manifest.json is no JSON object")
        return content

    @property
    def packs(self) -> list[dict[str, Any]]:
        """The rows of the manifest, one per pack."""
        rows = self.manifest.get("packs")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ReleaseError("packs/manifest.json lists no packs")
        return rows

    def is_pack(self, name: str) -> bool:
        """Say whether a path in the wheel is a kernel pack."""
        libraries = (".so", ".dylib", ".dll")
        return name.startswith(f"{PACKAGE}/packs/") and name.endswith(libraries)

    def metadata(self, file: str, key: str) -> list[str]:
        """Return the values that a key has in a file of the metadata folder."""
        return _headers(self.contents.get(f"{self.dist_info}/{file}", b"")).get_all(key, [])


def gpu_archs(wheels: Iterable[Path]) -> list[str]:
    """Return the archs for which any of the wheels has machine code, oldest first."""
    archs = {pack["arch"] for path in wheels for pack in Wheel.read(path).packs if pack["arch"]}
    return sorted(archs, key=lambda arch: int(arch.removeprefix("sm")))


@dataclass(frozen=True)
class Metadata:
    """The metadata that an installer reads before it downloads a distribution."""

    name: str
    version: str
    requires_python: str | None


def _headers(text: bytes) -> Message:
    return email.message_from_bytes(text)


def parse_metadata(text: bytes) -> Metadata:
    """Parse a METADATA or PKG-INFO file."""
    headers = _headers(text)
    for key in ("Metadata-Version", "Name", "Version"):
        if not headers[key]:
            raise ReleaseError(f"the metadata has no {key}")
    return Metadata(normalized(headers["Name"]), headers["Version"], headers["Requires-Python"])


def core_metadata(path: Path) -> bytes:
    """Return the METADATA of a wheel or the PKG-INFO of an sdist, byte for byte."""
    if path.suffix == ".whl":
        wheel = Wheel.read(path)
        found = [wheel.contents.get(f"{wheel.dist_info}/METADATA")]
    else:
        with tarfile.open(path) as sdist:
            names = [name for name in sdist.getnames() if re.fullmatch(r"[^/]+/PKG-INFO", name)]
            streams = [sdist.extractfile(name) for name in names]
            found = [stream.read() for stream in streams if stream is not None]
    if len(found) != 1 or found[0] is None:
        raise ReleaseError(f"{path.name} does not have exactly one metadata file")
    return found[0]


def is_distribution(name: str) -> bool:
    return name.endswith((".whl", ".tar.gz"))


def normalized(name: str) -> str:
    """Return a project's name in the normalized form of PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def project_and_version(filename: str) -> tuple[str, str]:
    """Return the normalized project and the version in a file's name."""
    if filename.endswith(".whl"):
        parts = filename.removesuffix(".whl").split("-")
        if len(parts) in (5, 6):
            return normalized(parts[0]), parts[1]
    elif filename.endswith(".tar.gz"):
        name, dash, version = filename.removesuffix(".tar.gz").rpartition("-")
        if dash and name:
            return normalized(name), version
    raise ReleaseError(f"{filename} is not named as a wheel or an sdist is")


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
