# SPDX-License-Identifier: BSD-3-Clause
"""Writes wheels reproducibly: the same files give the same bytes."""

from __future__ import annotations

import base64
import hashlib
import os
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

from release.distributions import Wheel

_REGULAR_FILE = 0o100000
# The oldest time that a zip archive can hold; the default of SOURCE_DATE_EPOCH.
_OLDEST = 315532800


def write_wheel(path: Path, files: Mapping[str, bytes]) -> Path:
    """Write a wheel with a RECORD of its files; those of the metadata folder come last."""
    (info,) = {name.partition("/")[0] for name in files if ".dist-info/" in name}
    record = f"{info}/RECORD"
    content = {name: data for name, data in files.items() if name != record}
    names = sorted(content, key=lambda name: (name.startswith(f"{info}/"), name))
    lines = [f"{name},sha256={_digest(content[name])},{len(content[name])}\n" for name in names]
    content[record] = "".join([*lines, f"{record},,\n"]).encode()
    seconds = max(int(os.environ.get("SOURCE_DATE_EPOCH", _OLDEST)), _OLDEST)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in [*names, record]:
            member = zipfile.ZipInfo(name, time.gmtime(seconds)[:6])
            member.compress_type = zipfile.ZIP_DEFLATED
            mode = 0o755 if name.endswith(".so") else 0o644
            member.external_attr = (_REGULAR_FILE | mode) << 16
            archive.writestr(member, content[name])
    return path


def add_files(path: Path, files: Mapping[str, bytes]) -> None:
    """Add files to a wheel, or replace them."""
    write_wheel(path, {**Wheel.read(path).contents, **files})


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
