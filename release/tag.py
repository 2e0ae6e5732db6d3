# SPDX-License-Identifier: BSD-3-Clause
"""Checks whether a tag can become a release.

Checks the version in pyproject.toml and in the conda recipe, the entry in CHANGELOG.md, the
machines for GPU tests, and the manual steps, which are printed as a list. A pre-release needs
neither machines nor the steps for final releases.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from release import checklist, targets
from release.project import ROOT, ReleaseError, pyproject_value

RECIPE = "conda/recipe.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tag", help="such as v2.0.0")
    parser.add_argument(
        "--gpu-runners", help="the repository's variable GPU_RUNNERS, empty where it has none"
    )
    parser.add_argument("--owner", help="of the repository; written where OWNER stands for them")


def run(options: argparse.Namespace) -> None:
    """Print `version=...` and `pre_release=true|false`, in the form of a workflow's outputs.

    With the variable of GPU runners also `gpu=true|false`: whether the release is tested on them.
    The manual steps are printed on stderr.
    """
    if options.owner:
        checklist.name_owner(options.owner)
    print("\n".join(map(str, checklist.items(runners=options.gpu_runners))), file=sys.stderr)
    version = check_tag(options.tag)
    outputs = {"version": version, "pre_release": str(is_pre_release(version)).lower()}
    if options.gpu_runners is not None:
        outputs["gpu"] = str(has_gpu_tests(options.gpu_runners, version)).lower()
    print("\n".join(f"{name}={value}" for name, value in outputs.items()))


def is_pre_release(version: str) -> bool:
    return re.search(r"(a|b|rc|\.dev)\d+$", version) is not None


def has_gpu_tests(runners: str, version: str) -> bool:
    """Say whether there are machines that test a version on GPUs.

    Args:
        runners: the variable GPU_RUNNERS: JSON, or empty.
        version: without machines, it must be a pre-release.

    Raises:
        ReleaseError: a final release has no machine, or the variable is not as docs/release.md
            describes it.
    """
    try:
        rows = json.loads(runners.strip() or "[]")
    except ValueError as error:
        raise ReleaseError(f"the variable GPU_RUNNERS is no JSON: {error}") from error
    table = targets.load()
    allowed = {
        "machine": [platform.machine for platform in table.platforms],
        "cuda": [cuda.major for cuda in table.cuda],
    }
    for row in rows if isinstance(rows, list) else [rows]:
        if not isinstance(row, dict) or not row.get("runner"):
            raise ReleaseError(f"the variable GPU_RUNNERS has {row!r}, which names no runner")
        for key, values in allowed.items():
            if row.get(key) not in values:
                raise ReleaseError(
                    f"the variable GPU_RUNNERS gives {row['runner']} the {key} {row.get(key)!r}; "
                    f"it may be {' or '.join(map(repr, values))}"
                )
    if not rows and not is_pre_release(version):
        raise ReleaseError(
            f"{version} is a final release, which has to be tested on a GPU, but the repository's "
            "variable GPU_RUNNERS names no machine: docs/release.md tells how to set it up. A "
            f"pre-release, such as {version}rc1, may do without"
        )
    return bool(rows)


def check_tag(tag: str, root: Path = ROOT, *, dated: bool = True) -> str:
    """Return the version that a tag releases.

    Args:
        tag: such as v2.0.0.
        root: the source tree.
        dated: require a date in the changelog, and that all manual steps are done. A rehearsal
            runs before that.

    Raises:
        ReleaseError: the tag is not the declared version, the recipe has another, the changelog
            lacks it, or a step that this release needs is open.
    """
    version = pyproject_value("version", root)
    if tag != f"v{version}":
        raise ReleaseError(
            f'the tag is {tag!r}, but pyproject.toml declares "{version}"; '
            f"the tag of that version is v{version}"
        )
    recipe = re.findall(r'^  version: "(.*)"$', (root / RECIPE).read_text(), re.MULTILINE)
    if recipe != [version]:
        raise ReleaseError(
            f'pyproject.toml declares "{version}", '
            f"but {RECIPE} has {' and '.join(recipe) or 'none'}"
        )
    heading, _ = changes(version, root)
    if dated and not re.search(r"\(\d{4}-\d\d-\d\d\)$", heading):
        raise ReleaseError(
            f'CHANGELOG.md says "{heading}"; a release has its date there: '
            f'"## {version} (2030-01-31)"'
        )
    needed = [item for item in checklist.items(root) if item.early or not is_pre_release(version)]
    unfinished = [item for item in needed if dated and not item.state]
    if unfinished:
        told = "\n".join(map(str, unfinished))
        raise ReleaseError(f"{version} waits for what a person has to do:\n{told}")
    return version


def changes(version: str, root: Path = ROOT) -> tuple[str, str]:
    """Return the heading of a version in CHANGELOG.md, and the text below it."""
    text = (root / "CHANGELOG.md").read_text()
    heading = rf"^(## {re.escape(version)}(?: [^\n]*)?)$"
    match = re.search(rf"{heading}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if match is None or not match[2].strip():
        raise ReleaseError(f'CHANGELOG.md has no "## {version}" with text below it')
    return match[1], match[2].strip()
