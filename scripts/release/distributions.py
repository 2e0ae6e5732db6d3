# SPDX-License-Identifier: BSD-3-Clause
"""Wheels and sdists as files: what their names and their metadata say."""

from __future__ import annotations

import email
import hashlib
import re
import tarfile
import zipfile
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

SUFFIXES = (".whl", ".tar.gz")


@dataclass(frozen=True)
class Metadata:
    """What an installer wants to know of a distribution before it downloads it."""

    name: str
    version: str
    requires_python: str | None


def is_distribution(name: str) -> bool:
    return name.endswith(SUFFIXES)


def normalized(name: str) -> str:
    """Return a project's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def project_and_version(filename: str) -> tuple[str, str]:
    """Return what a file's name says of its project, normalized, and of its version."""
    if filename.endswith(".whl"):
        parts = filename.removesuffix(".whl").split("-")
        if len(parts) in (5, 6):
            return normalized(parts[0]), parts[1]
    elif filename.endswith(".tar.gz"):
        name, dash, version = filename.removesuffix(".tar.gz").rpartition("-")
        if dash and name:
            return normalized(name), version
    raise ValueError(f"{filename} is not named as a wheel or an sdist is")


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def core_metadata(path: Path) -> bytes:
    """Return the METADATA of a wheel or the PKG-INFO of an sdist, byte for byte."""
    if path.name.endswith(".whl"):
        with zipfile.ZipFile(path) as wheel:
            return wheel.read(
                one([n for n in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)])
            )
    with tarfile.open(path) as sdist:
        member = one([n for n in sdist.getnames() if re.fullmatch(r"[^/]+/PKG-INFO", n)])
        stream = sdist.extractfile(member)
        assert stream is not None, f"{member} is not a file"
        return stream.read()


def one(names: list[str]) -> str:
    if len(names) != 1:
        raise ValueError(f"exactly one metadata file was expected, found {names}")
    return names[0]


def parse_metadata(text: bytes) -> Metadata:
    message: Message = email.message_from_bytes(text)
    for key in ("Metadata-Version", "Name", "Version"):
        if not message[key]:
            raise ValueError(f"the metadata has no {key}")
    return Metadata(normalized(message["Name"]), message["Version"], message["Requires-Python"])
