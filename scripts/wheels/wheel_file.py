# SPDX-License-Identifier: BSD-3-Clause
"""A wheel, unpacked for inspection."""

from __future__ import annotations

import json
import re
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from elftools.common.exceptions import ELFError

from wheels.elf import Library, read_library

__all__ = ["PACKAGE", "Wheel", "WheelError"]

PACKAGE = "flash_dmattn"


class WheelError(ValueError):
    """The file is no wheel, or cannot be judged."""


@dataclass(frozen=True)
class Wheel:
    """A wheel's file, and a folder with its content."""

    path: Path
    folder: Path

    @classmethod
    def unpack(cls, path: Path, folder: Path) -> Wheel:
        """Unpack a wheel into an empty folder."""
        try:
            with zipfile.ZipFile(path) as archive:
                archive.extractall(folder)
        except (OSError, zipfile.BadZipFile) as error:
            raise WheelError(f"{path} cannot be unpacked: {error}") from error
        return cls(path, folder)

    @property
    def tag(self) -> str:
        """The tag in the file's name, such as ``cp310-abi3-linux_x86_64``."""
        return "-".join(self.path.name.removesuffix(".whl").split("-")[-3:])

    @property
    def manylinux(self) -> bool:
        """The name promises that the wheel runs on every Linux of some age."""
        return "manylinux" in self.tag

    @property
    def machine(self) -> str:
        """The machine in the file's name, such as ``x86_64``."""
        found = re.search(r"(x86_64|aarch64)$", self.tag)
        return found[1] if found else self.tag.rpartition("-")[2]

    @cached_property
    def files(self) -> tuple[str, ...]:
        """The paths in the wheel."""
        found = (path for path in self.folder.rglob("*") if path.is_file())
        return tuple(sorted(path.relative_to(self.folder).as_posix() for path in found))

    @cached_property
    def dist_info(self) -> str:
        """The name of the folder with the metadata."""
        folders = {name.partition("/")[0] for name in self.files}
        found = [name for name in folders if name.endswith(".dist-info")]
        if len(found) != 1:
            raise WheelError(f"{self.path.name} has {len(found)} .dist-info folders, not one")
        return found[0]

    @cached_property
    def libraries(self) -> dict[str, Library]:
        """The shared libraries by their path in the wheel."""
        names = [name for name in self.files if re.search(r"\.so(\.\d+)*$", name)]
        try:
            return {name: read_library(self.folder / name) for name in names}
        except ELFError as error:
            raise WheelError(f"one of {', '.join(names)} cannot be read as ELF: {error}") from error

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The content of packs/manifest.json."""
        path = self.folder / PACKAGE / "packs" / "manifest.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise WheelError(f"packs/manifest.json cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise WheelError("packs/manifest.json is no JSON object")
        return content

    def is_pack(self, name: str) -> bool:
        """Say whether a path in the wheel is a kernel pack."""
        return name.startswith(f"{PACKAGE}/packs/") and name.endswith(".so")

    def metadata(self, file: str, key: str) -> list[str]:
        """Return the values that a key has in a file of the metadata folder."""
        path = self.folder / self.dist_info / file
        if not path.is_file():
            return []
        lines = path.read_text(encoding="utf-8").split("\n\n", 1)[0].splitlines()
        return [line.partition(": ")[2].strip() for line in lines if line.startswith(f"{key}: ")]
