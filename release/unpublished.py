# SPDX-License-Identifier: BSD-3-Clause
"""What of a release an index does not have yet, so that an upload can be repeated.

An upload that fails halfway leaves some of the files in the index. Those are compared by hash: one
that is there as another file stops the release, since a published file is never replaced. Print a
workflow's output: ``count=`` how many files are left to upload.
"""

from __future__ import annotations

import argparse
import json
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from release.digests import digests_of
from release.loopback import JSON_TYPE
from release.project import PROJECT, ReleaseError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="holds the distributions")
    parser.add_argument("--index", required=True, help="its address, which ends in /simple/")
    parser.add_argument("--output", type=Path, required=True, help="folder to copy the rest into")


def run(options: argparse.Namespace) -> None:
    """Copy what is left to upload."""
    published = files_of(options.index)
    options.output.mkdir(parents=True)
    left = 0
    for name, digest in digests_of(options.folder).items():
        present = published.get(name)
        if present is None:
            shutil.copy(options.folder / name, options.output)
            left += 1
        elif present != digest:
            raise ReleaseError(
                f"{name} is published with the sha256 {present}, here it is {digest}"
            )
    print(f"count={left}")


def files_of(index: str) -> dict[str, str]:
    """Return the sha256 of each file that an index has of the project; none if it has no project.

    Raises:
        ReleaseError: the index does not answer, or not in the form of PEP 691.
    """
    if not index.startswith(("https://", "http://127.0.0.1:")):
        raise ReleaseError(f"{index} is not asked: neither https nor this machine")
    request = urllib.request.Request(f"{index}{PROJECT}/", headers={"Accept": JSON_TYPE})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            content: dict[str, Any] = json.load(response)
            return {row["filename"]: row["hashes"]["sha256"] for row in content["files"]}
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return {}
        raise ReleaseError(f"{index}{PROJECT}/: {error}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReleaseError(f"{index}{PROJECT}/ does not list files: {error!r}") from error
