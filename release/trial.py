# SPDX-License-Identifier: BSD-3-Clause
"""A release as its users get it: installed from the index, and tried outside of the source tree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from release.distributions import Wheel, sha256
from release.programs import call
from release.project import PROJECT, ReleaseError, pyproject_value


def install(index: str, served: str, wheel: Path, environment: Path, report: Path) -> None:
    """Install from the index, with what the project needs from where pip is told to look.

    Args:
        index: the address of the index.
        served: the address of the wheel that pip has to take.
        wheel: that wheel.
        environment: with torch, but without the project.
        report: a file for pip's report, which tells where it took the project from, and which hash
            the file had.
    """
    call(
        [
            *(environment / "bin" / "python", "-m", "pip", "install", "--no-cache-dir"),
            *("--only-binary=:all:", "--extra-index-url", index, "--report", report),
            f"{PROJECT}=={pyproject_value('version')}",
        ]
    )
    check_taken(json.loads(report.read_text()), served, sha256(wheel))


def check_taken(report: Mapping[str, Any], url: str, digest: str) -> None:
    """Check by pip's report that it took the project from an address, and left torch alone."""
    taken = {item["metadata"]["name"]: item["download_info"] for item in report["install"]}
    if "torch" in taken:
        raise ReleaseError(f"pip replaced torch by {taken['torch']['url']}")
    found = (taken[PROJECT]["url"], taken[PROJECT]["archive_info"]["hashes"]["sha256"])
    if found != (url, digest):
        raise ReleaseError(f"pip installed {found}, not {(url, digest)}")


def self_test(environment: Path, wheel: Path, folder: Path) -> None:
    """Run the self-test outside of the source tree; every pack of the wheel must be there."""
    call([environment / "bin" / "python", "-m", "flash_dmattn", "--selftest"], cwd=folder)
    (manifest,) = environment.glob("lib/python*/site-packages/flash_dmattn/packs/manifest.json")
    installed = json.loads(manifest.read_text())["packs"]
    if installed != Wheel.read(wheel).packs:
        raise ReleaseError(f"{manifest} does not list the packs of {wheel.name}")
    print(f"   installed packs: {', '.join(pack['name'] for pack in installed)}")
