# SPDX-License-Identifier: BSD-3-Clause
"""Builds the packs of a release again from its sources, and compares them bit for bit.

The build record is an asset of the release, flash-dmattn-VERSION.build.json. It has the commit, the
digests of the images and the hashes of the packs. Only the packs of this machine's platform are
built. Needs docker, or the program in FDM_CONTAINER, and a checkout of that commit; no GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from release.build_record import SCHEMA
from release.distributions import is_distribution, sha256
from release.programs import call
from release.project import ROOT, ReleaseError, commit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("record", type=Path, help="the release's build record")
    parser.add_argument("--cuda", action="append", help="only the packs of this CUDA major")
    parser.add_argument(
        "--here", action="store_true", help="build with this machine's nvcc, in no image"
    )
    parser.add_argument(
        "--built", type=Path, help="keep what is built here; build/reproduced unless given"
    )


def run(options: argparse.Namespace) -> None:
    """Build, compare, and print a line for each pack."""
    record = read_record(options.record)
    check_sources(record)
    jobs = chosen_jobs(record, options.cuda)
    folder = options.built or ROOT / "build" / "reproduced"
    expected = packs_of(record)
    built = set()
    differing = []
    for job in jobs:
        output = folder / job["artifact"]
        call(
            command(job, output, here=options.here),
            cwd=ROOT,
            variables={"SOURCE_DATE_EPOCH": str(record["source_date_epoch"])},
        )
        for file in sorted(output.glob("*.so")):
            found = sha256(file)
            built.add(file.name)
            same = expected.get(file.name) == found
            print(f"{'same' if same else 'DIFFERS'}  {found}  {file.name}")
            if not same:
                differing.append(file.name)
    prefixes = tuple(f"libflash_dmattn_cu{job['cuda']}_" for job in jobs)
    differing += sorted(
        name for name in expected if name.startswith(prefixes) and name not in built
    )
    if differing:
        raise ReleaseError(f"not what the record says: {', '.join(differing)}")


def read_record(path: Path) -> dict[str, Any]:
    """Return the record of a release.

    Raises:
        ReleaseError: the file is no build record, or of another schema.
    """
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ReleaseError(f"{path} cannot be read: {error}") from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise ReleaseError(f"{path} is no build record of schema {SCHEMA}")
    return record


def check_sources(record: Mapping[str, Any]) -> None:
    """Raise ReleaseError unless this tree is the record's commit without changes."""
    here = commit()
    if here != record["commit"]:
        raise ReleaseError(
            f"the release was built of {record['commit']}, this tree is {here or 'no commit'}: "
            f"git checkout {record['commit']}"
        )


def chosen_jobs(record: Mapping[str, Any], cudas: Sequence[str] | None) -> list[dict[str, str]]:
    """Return the jobs of a record that built packs for this machine's platform."""
    rows: list[dict[str, str]] = record["jobs"]["packs"]
    chosen = [
        row
        for row in rows
        if row["machine"] == platform.machine() and row["cuda"] in (cudas or [row["cuda"]])
    ]
    if not chosen:
        built = ", ".join(f"CUDA {row['cuda']} for {row['machine']}" for row in rows)
        raise ReleaseError(f"nothing of the record can be built here; it has packs of {built}")
    return chosen


def packs_of(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the sha256 of each of this platform's packs in a record, by the file's name."""
    return {
        pack["file"]: pack["sha256"]
        for file in record["files"]
        if is_distribution(file["name"]) and file["name"].endswith(f"{platform.machine()}.whl")
        for pack in file["packs"]
    }


def command(job: Mapping[str, str], output: Path, *, here: bool) -> list[str | Path]:
    """Return the workflow's command for the job, with another output folder."""
    image: list[str | Path] = [ROOT / "scripts" / "in_image", job["image"], "python"]
    python: list[str | Path] = [sys.executable] if here else image
    arguments = ["--cuda", job["cuda"], "--archs", job["archs"], "--head-dims", job["head_dims"]]
    return [*python, "-m", "release", "packs", *arguments, "--output", output]
