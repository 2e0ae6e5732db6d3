# SPDX-License-Identifier: BSD-3-Clause
"""A package index (PEP 503 pages, PEP 691 JSON, PEP 658 metadata, PEP 592 yanks) as static files.

The only input is the list of releases from GitHub's API. The index is always written as a whole: it
drops files that were removed from their release, and cannot list a file with two hashes. Generators
of static indexes, such as dumb-pypi, put all files below one address, but a release's files are
below its tag. The list comes from
``gh api --paginate --slurp repos/OWNER/REPOSITORY/releases``.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import re
import sys
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from release.distributions import (
    Metadata,
    is_distribution,
    normalized,
    parse_metadata,
    project_and_version,
)
from release.project import PROJECT, ReleaseError

API_VERSION = "1.1"
METADATA_SUFFIX = ".metadata"

# Returns the content of the asset at an address.
Fetch = Callable[[str], bytes]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--releases",
        type=argparse.FileType(),
        default=sys.stdin,
        help="the releases as GitHub gives them, or a list of such pages; else standard input",
    )
    parser.add_argument("--output", type=Path, required=True, help="a folder without an index")
    parser.add_argument("--yanked", type=Path, help="JSON: reasons by version")


def run(options: argparse.Namespace) -> None:
    """Write the index, and print the hash of each file in it."""
    yanked = json.loads(options.yanked.read_text()) if options.yanked else {}
    files = files_of(flattened(json.load(options.releases)), PROJECT, download, yanked)
    write_index(files, options.output)
    for file in files:
        print(f"{file.sha256}  {file.filename}")


def flattened(content: list[Any]) -> list[dict[str, Any]]:
    """Return the releases of all pages; `gh api --slurp` gives a list of pages."""
    return [
        release for entry in content for release in (entry if isinstance(entry, list) else [entry])
    ]


def download(url: str) -> bytes:
    if not url.startswith(("https://", "http://127.0.0.1:")):
        raise ReleaseError(f"{url} is not fetched: neither https nor this machine")
    with urllib.request.urlopen(url, timeout=60) as response:
        content: bytes = response.read()
    return content


@dataclass(frozen=True)
class File:
    """One wheel or sdist of the index."""

    filename: str
    project: str
    version: str
    url: str
    sha256: str
    size: int
    uploaded: str
    requires_python: str | None
    metadata_sha256: str | None
    yanked: str | None


def files_of(
    releases: Iterable[Mapping[str, Any]],
    project: str,
    fetch: Fetch,
    yanked: Mapping[str, str] | None = None,
) -> list[File]:
    """Return the files of all published releases.

    Args:
        releases: as in `GET /repos/{owner}/{repo}/releases`; drafts are left out.
        project: a release may hold only distributions of this name, or of names that start with
            it and a dash.
        fetch: reads the metadata files, which are assets of the release.
        yanked: the reason for each yanked version.
    """
    found: dict[str, File] = {}
    reasons = yanked or {}
    for release in releases:
        if release["draft"]:
            continue
        assets = {asset["name"]: asset for asset in release["assets"]}
        for name, asset in assets.items():
            if not is_distribution(name):
                continue
            if name in found:
                raise ReleaseError(f"{name} is in two releases; a file must never be replaced")
            file_project, version = project_and_version(name)
            if file_project != project and not file_project.startswith(f"{project}-"):
                raise ReleaseError(f"{name} is not a distribution of {project}")
            metadata = metadata_of(name, assets, fetch)
            if metadata and (metadata[0].name, metadata[0].version) != (file_project, version):
                raise ReleaseError(f"the metadata of {name} is of {metadata[0]}")
            found[name] = File(
                filename=name,
                project=file_project,
                version=version,
                url=asset["browser_download_url"],
                sha256=digest_of(asset),
                size=asset["size"],
                uploaded=asset["created_at"],
                requires_python=metadata[0].requires_python if metadata else None,
                metadata_sha256=metadata[1] if metadata else None,
                yanked=reasons.get(version),
            )
    unused = sorted(set(reasons) - {file.version for file in found.values()})
    if unused:
        raise ReleaseError(f"versions to yank are in no release: {', '.join(unused)}")
    return sorted(found.values(), key=lambda file: (file.project, file.filename))


def digest_of(asset: Mapping[str, Any]) -> str:
    match = re.fullmatch(r"sha256:([0-9a-f]{64})", asset.get("digest") or "")
    if match is None:
        raise ReleaseError(f"the release says no sha256 of {asset['name']}")
    return match[1]


def metadata_of(
    name: str, assets: Mapping[str, Mapping[str, Any]], fetch: Fetch
) -> tuple[Metadata, str] | None:
    """Return the content and the sha256 of a distribution's metadata file."""
    asset = assets.get(name + METADATA_SUFFIX)
    if asset is None:
        return None
    text = fetch(asset["browser_download_url"])
    sha256 = hashlib.sha256(text).hexdigest()
    if sha256 != digest_of(asset):
        raise ReleaseError(f"{asset['name']} has the sha256 {sha256}, its release says otherwise")
    return parse_metadata(text), sha256


def write_index(files: Sequence[File], folder: Path) -> None:
    """Write the whole index below `simple/` of a folder, which may be a site."""
    if (folder / "simple").exists():
        raise ReleaseError(f"{folder} has an index; it is made anew, never added to")
    projects = sorted({file.project for file in files})
    links = [f'<a href="{project}/">{project}</a><br>' for project in projects]
    listing = {"meta": meta(), "projects": [{"name": project} for project in projects]}
    write_page(folder / "simple", "Simple index", links, listing)
    for project in projects:
        own = [file for file in files if file.project == project]
        write_page(
            folder / "simple" / project,
            f"Links for {project}",
            [anchor(file) for file in own],
            project_json(project, own),
        )


def write_page(folder: Path, title: str, lines: Sequence[str], content: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True)
    head = (
        "<!DOCTYPE html>\n<html>\n<head>\n"
        f'<meta name="pypi:repository-version" content="{API_VERSION}">\n'
        f"<title>{title}</title>\n</head>\n<body>\n<h1>{title}</h1>\n"
    )
    page = head + "".join(line + "\n" for line in lines) + "</body>\n</html>\n"
    (folder / "index.html").write_text(page)
    (folder / "index.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def meta() -> dict[str, str]:
    return {"api-version": API_VERSION}


def anchor(file: File) -> str:
    attributes = {"href": f"{file.url}#sha256={file.sha256}"}
    if file.requires_python:
        attributes["data-requires-python"] = file.requires_python
    if file.metadata_sha256:
        # Installers older than PEP 714 read the second name.
        attributes["data-core-metadata"] = f"sha256={file.metadata_sha256}"
        attributes["data-dist-info-metadata"] = f"sha256={file.metadata_sha256}"
    if file.yanked is not None:
        attributes["data-yanked"] = file.yanked
    text = " ".join(f'{key}="{html.escape(value)}"' for key, value in attributes.items())
    return f"<a {text}>{html.escape(file.filename)}</a><br>"


def project_json(project: str, files: Sequence[File]) -> dict[str, Any]:
    return {
        "meta": meta(),
        "name": normalized(project),
        "versions": sorted({file.version for file in files}),
        "files": [file_json(file) for file in files],
    }


def file_json(file: File) -> dict[str, Any]:
    content: dict[str, Any] = {
        "filename": file.filename,
        "url": file.url,
        "hashes": {"sha256": file.sha256},
        "size": file.size,
        "upload-time": file.uploaded,
        "yanked": file.yanked if file.yanked is not None else False,
    }
    if file.requires_python:
        content["requires-python"] = file.requires_python
    if file.metadata_sha256:
        # The older name is absent: older pip reads it, and fails on its value (PEP 714).
        content["core-metadata"] = {"sha256": file.metadata_sha256}
    return content
