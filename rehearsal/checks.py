# SPDX-License-Identifier: BSD-3-Clause
"""Checks the results of a rehearsal, in addition to the states of the jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rehearsal.machine import Machine
from release.build_record import file_name, images_of_jobs
from release.distributions import sha256
from release.matrix import LOCK
from release.pin import BRANCH
from release.programs import output
from release.project import ROOT, ReleaseError


def check_images(machine: Machine) -> dict[str, str]:
    """Return the digest of each image that the last run used; check that it used only one."""
    used = machine.hub / "images.jsonl"
    found: dict[str, str] = {}
    for event in events(used):
        image, _, digest = event["image"].partition("@")
        if found.setdefault(image, digest) != digest:
            raise ReleaseError(f"two jobs of one run have different digests of {image}")
    used.unlink(missing_ok=True)
    return found


def events(noted: Path) -> list[Any]:
    """Return the events that the stand-ins recorded, one JSON value per line."""
    return [json.loads(line) for line in noted.read_text().splitlines()] if noted.exists() else []


def check_dispatched(machine: Machine, expected: list[list[str]]) -> None:
    """Check which workflows the last run started, and on which branches."""
    found = events(machine.hub / "dispatched.jsonl")
    if found != expected:
        raise ReleaseError(f"the release started {found}, not {expected}")


def check_pinned(machine: Machine, used: dict[str, str]) -> None:
    """Check that a pull request proposes the digest of each used image."""
    if events(machine.hub / "pulls.jsonl") != [["main", BRANCH]]:
        raise ReleaseError("there is no pull request of the digests, or more than one")
    place = f"{BRANCH}:{LOCK.relative_to(ROOT)}"
    proposed = json.loads(output(["git", "-C", machine.repository, "show", place]))
    if differing := [image for image, digest in used.items() if proposed.get(image) != digest]:
        raise ReleaseError(f"the pull request has other digests of {', '.join(differing)}")


def check_notes(machine: Machine, tag: str, *, gpus: bool) -> None:
    """Check that the release's text says whether it was tested on GPUs."""
    notes = (machine.hub / "releases" / tag / "notes.md").read_text()
    if ("No GPU was at hand" in notes) == gpus:
        raise ReleaseError(f"the text of {tag} does not tell the truth about tests on GPUs")


def check_release(machine: Machine, tag: str, used: dict[str, str]) -> Path:
    """Check the release that was published, and return its wheel.

    Args:
        machine: the machine of the rehearsal.
        tag: the release's tag.
        used: the digest of each build image.
    """
    folder = machine.hub / "releases" / tag
    if json.loads((folder / "state.json").read_text())["draft"]:
        raise ReleaseError(f"{tag} is a draft still")
    assets = folder / "assets"
    for line in (assets / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        if sha256(assets / name) != digest:
            raise ReleaseError(f"SHA256SUMS says otherwise of {name}")
    record = json.loads((assets / file_name(tag.removeprefix("v"))).read_text())
    head = output(["git", "-C", machine.repository, "rev-parse", "HEAD"]).strip()
    if record["commit"] != head:
        raise ReleaseError(f"the build record names the commit {record['commit']}, not {head}")
    told = images_of_jobs(record["jobs"])
    if differing := [image for image, digest in used.items() if told.get(image) != digest]:
        raise ReleaseError(f"the build record has other digests of {', '.join(differing)}")
    (wheel,) = assets.glob("*.whl")
    return wheel
