# SPDX-License-Identifier: BSD-3-Clause
"""Creates the draft of a release on GitHub. Needs the gh program and GH_TOKEN.

It replaces a draft that a failed run left for the tag. It never replaces a published release.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

from release.programs import call
from release.project import PROJECT, ReleaseError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tag", help="one that exists")
    parser.add_argument("notes", type=Path, help="the release's text")
    parser.add_argument("folder", type=Path, help="every file of it is put into the draft")
    parser.add_argument("--pre-release", choices=["true", "false"], required=True)


def run(options: argparse.Namespace) -> None:
    """Create the draft."""
    view = ["gh", "release", "view", options.tag, "--json", "isDraft", "--jq", ".isDraft"]
    present = subprocess.run(view, capture_output=True, text=True, check=False)
    if present.returncode == 0:
        if present.stdout.strip() != "true":
            raise ReleaseError(
                f"{options.tag} is published; a release is never replaced, make a new version"
            )
        call(["gh", "release", "delete", options.tag, "--yes"])
    title = f"{PROJECT} {options.tag.removeprefix('v')}"
    call(
        [
            *("gh", "release", "create", options.tag, "--draft", "--verify-tag", "--title", title),
            *("--notes-file", options.notes, f"--prerelease={options.pre_release}"),
            *sorted(options.folder.iterdir()),
        ]
    )
