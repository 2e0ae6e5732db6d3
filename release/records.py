# SPDX-License-Identifier: BSD-3-Clause
"""Writes the record of a GPU test: which wheel ran on which GPU with which pack."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from release.distributions import Wheel, gpu_archs, sha256
from release.project import PROJECT, ReleaseError


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("wheel", type=Path, help="the one that is installed, bit for bit")
    parser.add_argument("record", type=Path, help="the JSON file to write")


def run(options: argparse.Namespace) -> None:
    """Write the record; to be run with the tested environment's Python, after the tests."""
    check_installed(options.wheel, metadata.distribution(PROJECT))
    record_of(self_test(), options.wheel).write(options.record)


def check_installed(wheel: Path, distribution: metadata.Distribution) -> None:
    """Check that every file of a wheel is installed unchanged, except the installer's RECORD."""
    for name, content in Wheel.read(wheel).contents.items():
        place = Path(str(distribution.locate_file(name)))
        if name.endswith(".dist-info/RECORD"):
            continue
        if not place.is_file() or place.read_bytes() != content:
            raise ReleaseError(f"{wheel.name} is not what is installed: {name} differs")


def self_test() -> dict[str, Any]:
    """Return the self-test report of the installed package."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "flash_dmattn", "--selftest", "--json"],
            cwd=folder,
            stdout=subprocess.PIPE,
            check=False,
        )
    if done.returncode != 0:
        raise ReleaseError(f"the self-test ended with {done.returncode}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def record_of(report: dict[str, Any], wheel: Path) -> GpuRecord:
    """Return the record of the first GPU in a report of `python -m flash_dmattn --json`."""
    gpus = [device for device in report["devices"] if device["kind"] == "cuda"]
    if not gpus:
        raise ReleaseError("no GPU is visible")
    if gpus[0]["pack"] is None:
        raise ReleaseError(f"no pack serves {gpus[0]['text']}: {gpus[0]['problem']}")
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
        ReleaseError: a record is of another file.
    """
    digests = {path.name: sha256(path) for path in wheels}
    for record in records:
        if digests.get(record.wheel) != record.sha256:
            raise ReleaseError(
                f"a GPU test ran {record.wheel} with sha256 {record.sha256}, "
                f"which is not in this release"
            )


def archs_not_run(records: Iterable[GpuRecord], wheels: Iterable[Path]) -> list[str]:
    """Return the archs in the wheels that no GPU test ran."""
    run_archs = {record.pack.partition("-")[2] for record in records}
    return [arch for arch in gpu_archs(wheels) if arch not in run_archs]
