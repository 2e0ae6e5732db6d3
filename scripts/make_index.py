# SPDX-License-Identifier: BSD-3-Clause
"""Make the package index of all releases: static pages that pip and uv take with --index-url.

gh api --paginate --slurp repos/OWNER/REPOSITORY/releases | scripts/make_index.py --output site
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from release.simple_index import InvalidReleaseError, files_of, write_index

PROJECT = "flash-dmattn"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--releases",
        type=argparse.FileType(),
        default=sys.stdin,
        help="the releases as GitHub gives them, or a list of such pages; else standard input",
    )
    parser.add_argument("--output", type=Path, required=True, help="an empty or absent folder")
    parser.add_argument("--yanked", type=Path, help="JSON: reasons by version")
    options = parser.parse_args(arguments)
    yanked = json.loads(options.yanked.read_text()) if options.yanked else {}
    try:
        files = files_of(flattened(json.load(options.releases)), PROJECT, download, yanked)
        write_index(files, options.output)
    except InvalidReleaseError as error:
        print(f"make_index: {error}", file=sys.stderr)
        return 1
    for file in files:
        print(f"{file.sha256}  {file.filename}")
    return 0


def flattened(content: list[Any]) -> list[dict[str, Any]]:
    """Return the releases of all pages; `gh api --slurp` gives a list of pages."""
    return [
        release for entry in content for release in (entry if isinstance(entry, list) else [entry])
    ]


def download(url: str) -> bytes:
    if not url.startswith(("https://", "http://127.0.0.1:")):
        raise InvalidReleaseError(f"{url} is not fetched: neither https nor this machine")
    with urllib.request.urlopen(url, timeout=60) as response:
        content: bytes = response.read()
    return content


if __name__ == "__main__":
    sys.exit(main())
