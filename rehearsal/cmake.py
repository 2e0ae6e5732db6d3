# SPDX-License-Identifier: BSD-3-Clause
"""Stands in for cmake where CUDA packs are built, and compiles no kernels.

It copies the packs from the folder REHEARSAL_PACKS, where they were built before. Without one, it
makes libraries without kernels, with the name, the exported symbol, the label of machine code and
the row of the manifest that the options ask for.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from release import targets
from release.project import MANIFEST_SCHEMA, abi_version, pyproject_value
from tests.distribution.small_wheel import PACK, compile_library, describe, fat_binary

DEFINITIONS = "definitions.json"


def main() -> int:
    """Configure, build or install; the first option selects the step."""
    words = sys.argv[1:]
    steps = {"-S": configure, "--build": build, "--install": install}
    steps[words[0]](words)
    return 0


def configure(words: list[str]) -> None:
    definitions = dict(word[2:].split("=", 1) for word in words if word.startswith("-D"))
    folder = Path(words[words.index("-B") + 1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DEFINITIONS).write_text(json.dumps(definitions))


def build(words: list[str]) -> None:
    folder = Path(words[1])
    definitions = json.loads((folder / DEFINITIONS).read_text())
    toolkit = os.environ["REHEARSAL_CUDA"]
    rows = [
        pack(folder / "packs", toolkit, arch, definitions)
        for arch in archs(definitions["FLASH_DMATTN_ARCHS"], toolkit)
    ]
    manifest = {
        "schema": MANIFEST_SCHEMA,
        "version": pyproject_value("version"),
        "abi_version": abi_version(),
        "packs": rows,
    }
    (folder / "packs" / "manifest.json").write_text(json.dumps(manifest, indent=1))


def install(words: list[str]) -> None:
    folder, prefix = Path(words[1]), Path(words[words.index("--prefix") + 1])
    shutil.copytree(folder / "packs", prefix / "flash_dmattn" / "packs")


def archs(wanted: str, toolkit: str) -> list[targets.Arch]:
    """Return the archs of an option such as `sm80;90`; an empty one means all."""
    able = targets.load().archs_of(toolkit)
    names = [f"sm{name.removeprefix('sm')}" for name in wanted.split(";") if name]
    return [arch for arch in able if not names or arch.name in names]


def pack(
    folder: Path, toolkit: str, arch: targets.Arch, definitions: dict[str, str]
) -> dict[str, Any]:
    """Copy or make one pack, and return its row of the manifest."""
    folder.mkdir(exist_ok=True)
    commit = {"commit": definitions["FLASH_DMATTN_COMMIT"] or None}
    name = f"cu{toolkit.partition('.')[0]}-{arch.name}"
    if before := os.environ["REHEARSAL_PACKS"]:
        listed = json.loads(Path(before, "manifest.json").read_text())["packs"]
        (row,) = [row for row in listed if row["name"] == name]
        shutil.copy(Path(before, row["file"]), folder)
        return {**row, **commit}
    file = f"libflash_dmattn_{name.replace('-', '_')}.so"
    number = int(arch.name.removeprefix("sm"))
    content = compile_library(fat_binary((2, number)) + PACK, folder / file)
    (folder / file).with_suffix(".c").unlink()
    head_dims = [int(dim) for dim in definitions["FLASH_DMATTN_HEAD_DIMS"].split(";") if dim]
    return {
        **describe(name, file),
        **commit,
        "cuda": toolkit,
        "head_dims": head_dims or list(targets.load().head_dims),
        "sha256": hashlib.sha256(content).hexdigest(),
        "size": len(content),
    }


if __name__ == "__main__":
    sys.exit(main())
