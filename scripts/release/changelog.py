# SPDX-License-Identifier: BSD-3-Clause
"""The version of the project, and what CHANGELOG.md says of it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRE_RELEASE = re.compile(r"(a|b|rc|\.dev)\d+$")


class NotReleasableError(Exception):
    """The tree does not say what a release of this version needs it to say."""


def declared_version(root: Path = ROOT) -> str:
    """Return the version that stands, once, in pyproject.toml."""
    found = re.findall(r'^version = "(.+)"$', (root / "pyproject.toml").read_text(), re.MULTILINE)
    if len(found) != 1:
        raise NotReleasableError(f"pyproject.toml must have one version, found {found}")
    return str(found[0])


def is_pre_release(version: str) -> bool:
    return PRE_RELEASE.search(version) is not None


def check_tag(tag: str, root: Path = ROOT, *, dated: bool = True) -> str:
    """Return the version that a tag releases.

    Args:
        tag: such as v2.0.0.
        root: of the source tree.
        dated: the changelog must give the version a date; a rehearsal comes before that.

    Raises:
        NotReleasableError: the tag is not the declared version, or the changelog lacks it.
    """
    version = declared_version(root)
    if tag != f"v{version}":
        raise NotReleasableError(
            f'the tag is {tag!r}, but pyproject.toml declares "{version}"; '
            f"the tag of that version is v{version}"
        )
    heading, _ = section(version, root)
    if dated and not re.search(r"\(\d{4}-\d\d-\d\d\)$", heading):
        raise NotReleasableError(
            f'CHANGELOG.md says "{heading}"; a release has its date there: '
            f'"## {version} (2030-01-31)"'
        )
    return version


def section(version: str, root: Path = ROOT) -> tuple[str, str]:
    """Return the heading of a version in CHANGELOG.md, and the text below it."""
    text = (root / "CHANGELOG.md").read_text()
    heading = rf"^(## {re.escape(version)}(?: [^\n]*)?)$"
    match = re.search(rf"{heading}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if match is None or not match[2].strip():
        raise NotReleasableError(f'CHANGELOG.md has no "## {version}" with text below it')
    return match[1], match[2].strip()
