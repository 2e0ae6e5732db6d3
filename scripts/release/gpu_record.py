# SPDX-License-Identifier: BSD-3-Clause
"""The record that a GPU test leaves of itself: which wheel ran on which GPU with which packs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from release.distributions import sha256
from release.packs import gpu_archs


class UntestedReleaseError(Exception):
    """The GPU tests do not stand for these wheels."""


@dataclass(frozen=True)
class GpuRecord:
    """One passed run of the test suite on a GPU."""

    wheel: str
    sha256: str
    device: str
    capability: str
    pack: str  # such as cu13-sm90: the one that the loader chose
    torch: str
    driver: str

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def record_of(report: dict[str, Any], wheel: Path) -> GpuRecord:
    """Return the record of the first GPU in a report of `python -m flash_dmattn --json`."""
    gpus = [device for device in report["devices"] if device["kind"] == "cuda"]
    if not gpus:
        raise UntestedReleaseError("no GPU is visible")
    if gpus[0]["pack"] is None:
        raise UntestedReleaseError(f"no pack serves {gpus[0]['text']}: {gpus[0]['problem']}")
    return GpuRecord(
        wheel=wheel.name,
        sha256=sha256(wheel),
        device=gpus[0]["name"],
        capability=".".join(str(part) for part in gpus[0]["capability"]),
        pack=gpus[0]["pack"]["name"],
        torch=report["versions"]["torch"],
        driver=report["cuda"]["driver"],
    )


def read_records(folder: Path) -> list[GpuRecord]:
    """Return all records below a folder, which may be absent."""
    return [GpuRecord(**json.loads(path.read_text())) for path in sorted(folder.rglob("*.json"))]


def check_records(records: Iterable[GpuRecord], wheels: Sequence[Path]) -> None:
    """Check that every record is of one of the wheels, bit for bit.

    Raises:
        UntestedReleaseError: one is of another file.
    """
    digests = {path.name: sha256(path) for path in wheels}
    for record in records:
        if digests.get(record.wheel) != record.sha256:
            raise UntestedReleaseError(
                f"a GPU test ran {record.wheel} with sha256 {record.sha256}, "
                f"which is not in this release"
            )


def archs_not_run(records: Iterable[GpuRecord], wheels: Sequence[Path]) -> list[str]:
    """Return the archs that are in the wheels, but ran in no GPU test."""
    run = {record.pack.partition("-")[2] for record in records}
    return [arch for arch in gpu_archs(wheels) if arch not in run]
