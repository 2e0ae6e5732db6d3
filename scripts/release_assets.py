# SPDX-License-Identifier: BSD-3-Clause
"""Complete a folder of wheels and an sdist into what a release holds.

Adds the metadata of each wheel as a file of its own (PEP 658), the bill of materials and
SHA256SUMS, and writes the release's text. Fails if a GPU test was of other wheels than these.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from release.changelog import NotReleasableError, declared_version, section
from release.distributions import core_metadata, is_distribution, project_and_version, sha256
from release.gpu_record import UntestedReleaseError, check_records, read_records
from release.notes import release_notes
from release.sbom import bill_of_materials
from release.simple_index import METADATA_SUFFIX

PROJECT = "flash-dmattn"
SUMS = "SHA256SUMS"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="holds the distributions and nothing else")
    parser.add_argument("--notes", type=Path, required=True, help="the release's text, to write")
    parser.add_argument("--gpu-records", type=Path, help="what scripts/record_gpu_test.py wrote")
    parser.add_argument("--require-gpu", action="store_true", help="fail without any GPU test")
    parser.add_argument("--commit", help="what was built")
    parser.add_argument("--repository", default="OWNER/REPOSITORY", help="where it is released")
    options = parser.parse_args(arguments)
    try:
        distributions = checked_distributions(options.folder)
        records = read_records(options.gpu_records) if options.gpu_records else []
        check_records(records, distributions)
        if options.require_gpu and not records:
            raise UntestedReleaseError("no GPU test ran these wheels")
        changes = section(declared_version())[1]
    except (NotReleasableError, UntestedReleaseError, ValueError) as error:
        print(f"release_assets: {error}", file=sys.stderr)
        return 1
    options.notes.write_text(release_notes(changes, distributions, records, options.repository))
    for path in distributions:
        if path.suffix == ".whl":
            path.with_name(path.name + METADATA_SUFFIX).write_bytes(core_metadata(path))
    bill = bill_of_materials(distributions, options.commit, timestamp())
    name = f"{PROJECT}-{declared_version()}.cdx.json"
    (options.folder / name).write_text(json.dumps(bill, indent=1) + "\n")
    assets = sorted(path for path in options.folder.iterdir() if path.name != SUMS)
    (options.folder / SUMS).write_text("".join(f"{sha256(p)}  {p.name}\n" for p in assets))
    return 0


def checked_distributions(folder: Path) -> list[Path]:
    """Return the distributions of a folder, which holds one sdist, wheels and nothing else."""
    paths = sorted(folder.iterdir())
    others = [path.name for path in paths if not is_distribution(path.name)]
    if others:
        raise ValueError(f"{folder} holds what is no distribution: {', '.join(others)}")
    wrong = [p.name for p in paths if project_and_version(p.name)[1] != declared_version()]
    if wrong:
        raise ValueError(f"not of version {declared_version()}: {', '.join(wrong)}")
    sdists = [path for path in paths if path.suffix != ".whl"]
    if len(sdists) != 1 or len(paths) < 2:
        raise ValueError(f"{folder} must hold one sdist and at least one wheel")
    return paths


def timestamp() -> str:
    """Return the time of the sources where SOURCE_DATE_EPOCH tells it, else the present."""
    seconds = os.environ.get("SOURCE_DATE_EPOCH")
    zone = datetime.timezone.utc
    when = (
        datetime.datetime.fromtimestamp(int(seconds), zone)
        if seconds
        else datetime.datetime.now(zone)
    )
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


if __name__ == "__main__":
    sys.exit(main())
