# SPDX-License-Identifier: BSD-3-Clause
"""What the kernel packs of a wheel are, by the manifest that lies in it."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MANIFEST = "flash_dmattn/packs/manifest.json"


def packs_of(wheel: Path) -> list[dict[str, Any]]:
    with zipfile.ZipFile(wheel) as archive:
        manifest = json.loads(archive.read(MANIFEST))
    packs: list[dict[str, Any]] = manifest["packs"]
    return packs


def gpu_archs(wheels: Iterable[Path]) -> list[str]:
    """Return the archs that any of the wheels has machine code for, oldest first."""
    archs = {pack["arch"] for wheel in wheels for pack in packs_of(wheel) if pack["arch"]}
    return sorted(archs, key=lambda arch: int(arch.removeprefix("sm")))
