# SPDX-License-Identifier: BSD-3-Clause
"""Prints the hashes of a job's files as an output of the job, or compares files with such hashes.

Any later job of a run can replace its artifacts, and the GPU job runs on a self-hosted machine. A
job's outputs cannot be replaced: signed and published files are compared with the outputs of the
jobs that built them. Attestations come too late, since the job that signs has already downloaded
the artifacts. sha256sum is not on every runner, and an output must be one line.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path

from release.distributions import is_distribution, sha256
from release.project import ReleaseError

WORD = re.compile(r"([^\s=/]+)=([0-9a-f]{64})")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="holds the distributions")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--name", help="print them as the workflow's output of this name")
    mode.add_argument("--expected", help="compare with what the jobs that built them printed")


def run(options: argparse.Namespace) -> None:
    """Print the hashes, or compare."""
    found = digests_of(options.folder)
    if options.name:
        print(f"{options.name}={' '.join(f'{name}={digest}' for name, digest in found.items())}")
        return
    check(found, parsed(options.expected))
    print(f"{len(found)} files are what was built")


def digests_of(folder: Path) -> dict[str, str]:
    """Return the sha256 of each distribution of a folder, by its name."""
    paths = sorted(path for path in folder.iterdir() if is_distribution(path.name))
    if not paths:
        raise ReleaseError(f"{folder} holds no distribution")
    return {path.name: sha256(path) for path in paths}


def parsed(text: str) -> dict[str, str]:
    """Return the hashes of the outputs of several jobs, separated by spaces.

    Raises:
        ReleaseError: there is no hash, a word is no hash, or a name occurs twice.
    """
    found: dict[str, str] = {}
    for word in text.split():
        match = WORD.fullmatch(word)
        if match is None or match[1] in found:
            raise ReleaseError(f"the outputs of the build say {word!r}")
        found[match[1]] = match[2]
    if not found:
        raise ReleaseError("the outputs of the build say no hash")
    return found


def check(found: dict[str, str], built: dict[str, str]) -> None:
    """Raise ReleaseError unless the files have the hashes of the built files."""
    differing: Iterable[str] = sorted(
        name for name in found.keys() | built.keys() if found.get(name) != built.get(name)
    )
    for name in differing:
        raise ReleaseError(
            f"{name} has the sha256 {found.get(name, 'of no file')}, the job that builds it said "
            f"{built.get(name, 'nothing')}: an artifact was replaced after the build"
        )
