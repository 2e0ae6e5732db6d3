# SPDX-License-Identifier: BSD-3-Clause
"""Installs a release from its index as users do, and tests it outside of the source tree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from release.distributions import Wheel, sha256
from release.programs import call
from release.project import PROJECT, ReleaseError, pyproject_value


def install(index: str, served: str, wheel: Path, environment: Path, report: Path) -> None:
    """Install the project from the index, and its dependencies from pip's configured index.

    Args:
        index: the address of the index.
        served: the address of the wheel that pip must install.
        wheel: that wheel.
        environment: with torch, but without the project.
        report: the file for pip's report, which has the address and the hash of the installed file.
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
    """Check in pip's report that the project came from an address, and that torch was kept."""
    taken = {item["metadata"]["name"]: item["download_info"] for item in report["install"]}
    if "torch" in taken:
        raise ReleaseError(f"pip replaced torch by {taken['torch']['url']}")
    found = (taken[PROJECT]["url"], taken[PROJECT]["archive_info"]["hashes"]["sha256"])
    if found != (url, digest):
        raise ReleaseError(f"pip installed {found}, not {(url, digest)}")


def self_test(environment: Path, wheel: Path, folder: Path) -> None:
    """Run the self-test outside of the source tree; every pack of the wheel must be installed."""
    call([environment / "bin" / "python", "-m", "flash_dmattn", "--selftest"], cwd=folder)
    (manifest,) = environment.glob("lib/python*/site-packages/flash_dmattn/packs/manifest.json")
    installed = json.loads(manifest.read_text())["packs"]
    if installed != Wheel.read(wheel).packs:
        raise ReleaseError(f"{manifest} does not list the packs of {wheel.name}")
    print(f"   installed packs: {', '.join(pack['name'] for pack in installed)}")
