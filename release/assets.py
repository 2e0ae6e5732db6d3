# SPDX-License-Identifier: BSD-3-Clause
"""Writes the files of a release other than its wheels and its sdist.

These are the metadata of each wheel (PEP 658), the bill of materials, the build record, SHA256SUMS
and the release notes. Fails if a GPU test ran other wheels than these.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
from collections.abc import Sequence
from pathlib import Path

from release.build_record import build_record, file_name
from release.distributions import core_metadata, is_distribution, project_and_version, sha256
from release.index import METADATA_SUFFIX
from release.project import PROJECT, ReleaseError, pyproject_value
from release.records import GpuRecord, archs_not_run, check_records, read_records
from release.sbom import bill_of_materials
from release.tag import changes

SUMS = "SHA256SUMS"
MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="holds the distributions and nothing else")
    parser.add_argument("--notes", type=Path, required=True, help="the release's text, to write")
    parser.add_argument("--gpu-records", type=Path, help="what `release records` wrote")
    parser.add_argument("--require-gpu", action="store_true", help="fail without any GPU test")
    parser.add_argument("--commit", help="what was built")
    parser.add_argument("--build", help="the output `build` of `release matrix`: its build record")
    parser.add_argument("--repository", default="OWNER/REPOSITORY", help="where it is released")


def run(options: argparse.Namespace) -> None:
    """Check the folder, then write the other files."""
    version = pyproject_value("version")
    distributions = checked_distributions(options.folder, version)
    records = read_records(options.gpu_records) if options.gpu_records else []
    check_records(records, distributions)
    if options.require_gpu and not records:
        raise ReleaseError("no GPU test ran these wheels")
    _, text = changes(version)
    options.notes.write_text(release_notes(text, distributions, records, options.repository))
    for path in distributions:
        if path.suffix == ".whl":
            path.with_name(path.name + METADATA_SUFFIX).write_bytes(core_metadata(path))
    bill = bill_of_materials(distributions, options.commit, timestamp())
    write_json(options.folder / f"{PROJECT}-{version}.cdx.json", bill)
    if options.build:
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        record = build_record(distributions, options.build, options.commit, epoch)
        write_json(options.folder / file_name(version), record)
    assets = sorted(path for path in options.folder.iterdir() if path.name != SUMS)
    (options.folder / SUMS).write_text("".join(f"{sha256(p)}  {p.name}\n" for p in assets))


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def checked_distributions(folder: Path, version: str) -> list[Path]:
    """Return the distributions of a folder. It must hold one sdist, wheels and nothing else."""
    paths = sorted(folder.iterdir())
    others = [path.name for path in paths if not is_distribution(path.name)]
    if others:
        raise ReleaseError(f"{folder} holds what is no distribution: {', '.join(others)}")
    wrong = [path.name for path in paths if project_and_version(path.name)[1] != version]
    if wrong:
        raise ReleaseError(f"not of version {version}: {', '.join(wrong)}")
    sdists = [path for path in paths if path.suffix != ".whl"]
    if len(sdists) != 1 or len(paths) < 2:
        raise ReleaseError(f"{folder} must hold one sdist and at least one wheel")
    return paths


def timestamp() -> str:
    """Return the time in SOURCE_DATE_EPOCH, or the present time if it is not set."""
    seconds = os.environ.get("SOURCE_DATE_EPOCH")
    zone = datetime.timezone.utc
    when = (
        datetime.datetime.fromtimestamp(int(seconds), zone)
        if seconds
        else datetime.datetime.now(zone)
    )
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


def release_notes(
    changes_text: str,
    distributions: Sequence[Path],
    records: Sequence[GpuRecord],
    repository: str = "OWNER/REPOSITORY",
) -> str:
    """Return the release notes: the changes, the GPU tests and the files."""
    wheels = [path for path in distributions if path.suffix == ".whl"]
    lines = [changes_text, "", "### Tested on GPUs", ""]
    if records:
        lines += ["| GPU | capability | pack | torch | driver |", "|---|---|---|---|---|"]
        lines += [
            f"| {r.device} | {r.capability} | {r.pack} | {r.torch} | {r.driver} |" for r in records
        ]
    else:
        lines.append("No GPU was at hand: nothing of this release ran on one.")
    missing = archs_not_run(records, wheels)
    if missing:
        lines += [
            "",
            f"**In the wheels, but not run for this release: {', '.join(missing)}.** Their machine "
            "code was checked to be present and complete.",
        ]
    lines += ["", "### Files", "", "| file | MiB | sha256 |", "|---|---|---|"]
    lines += [
        f"| {path.name} | {path.stat().st_size / MIB:.1f} | `{sha256(path)}` |"
        for path in distributions
    ]
    lines += [
        "",
        "Verify a download: `sha256sum --check --ignore-missing SHA256SUMS`, and who built it: "
        f"`gh attestation verify FILE --repo {repository}`.",
    ]
    return "\n".join(lines) + "\n"
