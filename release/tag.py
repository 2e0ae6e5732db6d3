# SPDX-License-Identifier: BSD-3-Clause
"""Whether a tag can become a release.

That is: the version of the tree and of its recipe for conda, what CHANGELOG.md says of it, whether
there are machines that test it on GPUs, and what a person decides or fills in, which is printed as
a list. A pre-release may do without the machines, and without what concerns final releases alone.
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
    """Print `version=...` and `pre_release=true|false`, the form of a workflow's outputs.

    With the variable of GPU runners also `gpu=true|false`: whether the release is tested on them.
    What a person decides or fills in is printed as errors are.
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
        runners: the variable GPU_RUNNERS: JSON, or nothing.
        version: without them, it has to be a pre-release.

    Raises:
        ReleaseError: a final release has none, or the variable is not what docs/release.md says.
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
        root: of the source tree.
        dated: the changelog must give the version a date, and what a person decides or fills in
            must be done; a rehearsal comes before that.

    Raises:
        ReleaseError: the tag is not the declared version, the recipe has another, the changelog
            lacks it, or something is open that this release needs.
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
