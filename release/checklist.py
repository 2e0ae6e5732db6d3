# SPDX-License-Identifier: BSD-3-Clause
"""The list of manual steps before a release, with the state of each.

The states of some steps are read from the tree. Other steps change only the project's accounts: a
person records them in .github/decisions.json with a name and a date: ``"jane, 2030-01-31"``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from release import matrix, targets
from release.project import PROJECT, ROOT

DECISIONS = ".github/decisions.json"
# Files in which OWNER is a placeholder for the repository's owner.
_NAMING = ("pyproject.toml", ".github/CODEOWNERS", "conda/recipe.yaml", "README.md", "docs/*.md")
_OWNER = re.compile(r"\bOWNER\b")
# No page may have this sentence in a final release.
_UNRELEASED = re.compile(r"There is no release of version 2 yet")
# The steps in decisions.json: whether a pre-release needs the step, too, and its description.
_DECIDED: Mapping[str, tuple[bool, str]] = {
    "pypi-name": (
        False,
        f"the name {PROJECT} on PyPI, which belongs to the earlier project, is transferred",
    ),
    "pypi-publisher": (
        False,
        "PyPI's trusted publisher is this repository, release.yml and the environment pypi",
    ),
    "environments": (
        True,
        "the environments pypi and release have reviewers, and are restricted to tags v*",
    ),
    "pages": (True, "the source of the pages is GitHub Actions, and index.yml has deployed once"),
    "rules": (True, "tags v* and releases are protected, and main requires check and an owner"),
    "security-reports": (False, "private vulnerability reports are turned on"),
    "conda-feedstock": (
        False,
        "conda-forge has a feedstock, or conda/recipe.yaml is told to be built by its users",
    ),
}


@dataclass(frozen=True)
class Item:
    """A manual step.

    Attributes:
        name: such as ``owner``.
        what: its description, worded as if it is done.
        state: by whom or where it is done; "" while it is open.
        early: a pre-release needs it, too.
    """

    name: str
    what: str
    state: str
    early: bool

    def __str__(self) -> str:
        until = "every release" if self.early else "a final release"
        verdict = f"done ({self.state})" if self.state else f"OPEN, for {until}"
        return f"  {self.name:17} {verdict}: {self.what}"


def naming(root: Path = ROOT) -> list[Path]:
    """Return the files that still have the placeholder OWNER."""
    files = [path for name in _NAMING for path in sorted(root.glob(name))]
    return [path for path in files if _OWNER.search(path.read_text(encoding="utf-8"))]


def name_owner(owner: str, root: Path = ROOT) -> None:
    """Replace the placeholder with the owner's name in all files."""
    for path in naming(root):
        text = path.read_text(encoding="utf-8")
        path.write_text(_OWNER.sub(owner, text), encoding="utf-8")


def items(root: Path = ROOT, runners: str | None = None) -> Iterator[Item]:
    """Yield every item.

    Args:
        root: the source tree.
        runners: the repository's variable GPU_RUNNERS; None if it is unknown.
    """
    unnamed = [str(path.relative_to(root)) for path in naming(root)]
    yield Item(
        "owner",
        f"OWNER is replaced in {' '.join(unnamed)}: release tag --owner NAME"
        if unnamed
        else "the repository's owner is named",
        "" if unnamed else "in the tree",
        True,
    )
    digests = json.loads((root / ".github" / "images.json").read_text(encoding="utf-8"))
    missing = [
        image for image in matrix.images_of(matrix.jobs(targets.load())) if image not in digests
    ]
    yield Item(
        "digests",
        "the digest of each image of the builds is in .github/images.json"
        + (f"; absent: {' '.join(missing)}" if missing else ""),
        "" if missing else "in the tree",
        False,
    )
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    unreleased = [
        str(path.relative_to(root))
        for path in pages
        if path.exists() and _UNRELEASED.search(path.read_text(encoding="utf-8"))
    ]
    yield Item(
        "pages-say-so",
        "no page says that there is no release"
        + (f"; these do: {' '.join(unreleased)}" if unreleased else ""),
        "" if unreleased else "in the tree",
        False,
    )
    if runners is not None:
        has_gpu = runners.strip() not in ("", "[]")
        what = "the repository's variable GPU_RUNNERS names machines with GPUs"
        yield Item("gpu-runners", what, "set" if has_gpu else "", False)
    decided = json.loads((root / DECISIONS).read_text(encoding="utf-8"))
    for name, (early, what) in _DECIDED.items():
        yield Item(name, f"{what} ({DECISIONS})", str(decided.get(name, "")).strip(), early)
