# SPDX-License-Identifier: BSD-3-Clause
"""Reads facts of the project from the files that declare them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = "flash-dmattn"
MANIFEST_SCHEMA = 1


class ReleaseError(Exception):
    """A verb fails, or a check of a release does; the text says why."""


def pyproject_value(key: str, root: Path = ROOT) -> str:
    """Return the string value of a key that occurs once in pyproject.toml.

    Searches with a pattern, since Python 3.10 has no tomllib.
    """
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    found = re.findall(rf'^{re.escape(key)} = "(.+)"$', text, re.MULTILINE)
    if len(found) != 1:
        raise ReleaseError(f"pyproject.toml has {len(found)} lines with the key {key}, not one")
    return str(found[0])


def _pack_header(pattern: str) -> str:
    header = (ROOT / "cpp" / "pack.h").read_text(encoding="utf-8")
    found = re.search(pattern, header, re.MULTILINE)
    if found is None:
        raise ReleaseError(f"cpp/pack.h has no line {pattern}")
    return found[1]


def abi_version() -> int:
    """Return the version of the pack interface."""
    return int(_pack_header(r"^#define FDM_PACK_ABI_VERSION (\d+)$"))


def pack_symbol() -> str:
    """Return the name of the one function that a pack exports."""
    return _pack_header(r'^#define FDM_PACK_SYMBOL "(\w+)"$')


def commit(root: Path = ROOT) -> str:
    """Return the commit of the sources, with ``-dirty`` if they differ from it.

    "" if the sources are no checkout, such as those of an sdist.

    Raises:
        ReleaseError: git cannot read the checkout.
    """
    if not is_checkout(root):
        return ""
    head = _git(root, "rev-parse", "HEAD")
    return f"{head}-dirty" if _git(root, "status", "--porcelain", "-uno") else head


def commit_time(root: Path = ROOT) -> str | None:
    """Return the time of the sources' commit in seconds since 1970; None without a checkout.

    Raises:
        ReleaseError: git cannot read the checkout.
    """
    return _git(root, "log", "-1", "--format=%ct") if is_checkout(root) else None


def is_checkout(root: Path) -> bool:
    """Say whether a folder is the root of a checkout; git also accepts folders below one."""
    return (root / ".git").exists()


def _git(root: Path, *arguments: str) -> str:
    """Return git's output for a checkout."""
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise ReleaseError(f"{root} has a .git, but there is no program git") from error
    except subprocess.CalledProcessError as error:
        raise ReleaseError(
            f"{root} has a .git, but {' '.join(command)} failed: {error.stderr.strip()}"
        ) from error
    return done.stdout.strip()
