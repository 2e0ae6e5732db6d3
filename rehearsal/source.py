# SPDX-License-Identifier: BSD-3-Clause
"""The rehearsed repository: a clone of this one, with the commit of a release."""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path

from release import checklist, targets
from release.programs import call, output
from release.project import ROOT, ReleaseError, pyproject_value
from release.tag import changes

ORIGIN = "https://github.com/rehearsal/flash-dmattn.git"  # only act reads it, for the name
IDENTITY = ("-c", "user.name=rehearsal", "-c", "user.email=rehearsal@example.org")


def make_repository(folder: Path, change: Callable[[Path], None] = lambda folder: None) -> str:
    """Clone this tree's commit, commit the changes of a release, tag it, and return the tag.

    Args:
        folder: the folder of the clone.
        change: makes more changes in it before the commit.
    """
    if output(["git", "-C", ROOT, "status", "--porcelain", "-uno"]):
        raise ReleaseError(f"{ROOT} has changes that are not committed; workflows run commits")
    call(["git", "clone", "--quiet", "--no-hardlinks", ROOT, folder])
    git(folder, "checkout", "--quiet", "-B", "main")
    git(folder, "remote", "set-url", "origin", ORIGIN)
    version = pyproject_value("version")
    date_changelog(folder / "CHANGELOG.md", version)
    checklist.name_owner("rehearsal", folder)
    decide(folder / checklist.DECISIONS)
    lower_floor(folder / "cmake" / "targets.json")
    change(folder)
    call([sys.executable, "-m", "release", "tables", "--write"], cwd=folder)
    git(folder, *IDENTITY, "commit", "--quiet", "--all", "--message", f"Release {version}")
    tag = f"v{version}"
    git(folder, *IDENTITY, "tag", "--force", tag)
    git(folder, "config", "uploadpack.allowAnySHA1InWant", "true")
    return tag


def git(folder: Path, *arguments: str) -> None:
    call(["git", "-C", folder, *arguments])


def date_changelog(path: Path, version: str) -> None:
    """Give the version a date in the changelog."""
    heading, _ = changes(version, path.parent)
    path.write_text(path.read_text().replace(heading, f"## {version} (2030-01-31)", 1))


def decide(path: Path) -> None:
    """Mark all manual steps as done."""
    decided = dict.fromkeys(json.loads(path.read_text()), "the rehearsal, 2030-01-31")
    path.write_text(json.dumps(decided, indent=2) + "\n")


def lower_floor(table: Path) -> None:
    """Set the policy to this machine's libraries, which the wheels use. Images keep their names."""
    text = table.read_text()
    policy = targets.load(table).wheel.policy
    glibc = platform.libc_ver()[1]
    versions = {"policy": f"manylinux_{glibc.replace('.', '_')}", "glibc": glibc, **libstdcxx()}
    text = text.replace("{policy}", policy)
    for name, version in versions.items():
        text, count = re.subn(rf'("{name}": )"[\w.]+"', rf'\1"{version}"', text)
        if count != 1:
            raise ReleaseError(f"{table} has {count} values of {name}, not one")
    table.write_text(text)


def libstdcxx() -> dict[str, str]:
    """Return the newest symbol versions of the compiler's libstdc++."""
    path = Path(output(["c++", "-print-file-name=libstdc++.so.6"]).strip())
    content = path.read_bytes()
    newest = {}
    for name in ("GLIBCXX", "CXXABI"):
        found = re.findall(rf"\0{name}_([\d.]+)(?=\0)".encode(), content)
        if not found:
            raise ReleaseError(f"{path} has no symbols of versions {name}")
        newest[name.lower()] = max((v.decode() for v in found), key=targets.version_numbers)
    return newest
