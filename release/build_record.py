# SPDX-License-Identifier: BSD-3-Clause
"""The build record of a release: its sources, build images and files.

With it, a release can be built again and compared file by file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from release.distributions import Wheel, sha256
from release.matrix import BUILDS, DIGEST
from release.project import PROJECT, ReleaseError

SCHEMA = 1


def file_name(version: str) -> str:
    """Return the name of the record's file in a release."""
    return f"{PROJECT}-{version}.build.json"


def parse_jobs(text: str) -> dict[str, list[dict[str, str]]]:
    """Return the jobs in the output ``build`` of ``python -m release matrix``.

    Raises:
        ReleaseError: the text is no such output, or an image has no digest.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ReleaseError(f"the jobs of the build are no JSON: {error}") from error
    if not isinstance(found, dict) or sorted(found) != sorted(BUILDS):
        raise ReleaseError(f"the jobs of the build must have the members {', '.join(BUILDS)}")
    jobs: dict[str, list[dict[str, str]]] = found
    for row in (row for kind in BUILDS for row in jobs[kind]):
        _, _, digest = row["image"].partition("@")
        if not DIGEST.fullmatch(digest):
            raise ReleaseError(
                f"{row['artifact']} was built in {row['image']}, which has no digest"
            )
    return jobs


def images_of_jobs(jobs: dict[str, list[dict[str, str]]]) -> dict[str, str]:
    """Return the digest of each image that the jobs name."""
    names = [row["image"].partition("@") for rows in jobs.values() for row in rows]
    return {name: digest for name, _, digest in names}


def build_record(
    distributions: Sequence[Path], jobs: str, commit: str | None, epoch: str | None
) -> dict[str, Any]:
    """Return the record of the given wheels and sdists.

    Args:
        distributions: all distributions of the release.
        jobs: the output ``build`` of ``python -m release matrix``.
        commit: the commit that was built.
        epoch: SOURCE_DATE_EPOCH of the build, in seconds since 1970.
    """
    return {
        "schema": SCHEMA,
        "commit": commit,
        "source_date_epoch": None if epoch is None else int(epoch),
        "jobs": parse_jobs(jobs),
        "files": [_file(path) for path in sorted(distributions)],
    }


def _file(path: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": path.name, "sha256": sha256(path)}
    if path.suffix == ".whl":
        packs = sorted(Wheel.read(path).packs, key=lambda pack: str(pack["name"]))
        facts["packs"] = [{"file": pack["file"], "sha256": pack["sha256"]} for pack in packs]
    return facts
