# SPDX-License-Identifier: BSD-3-Clause
"""What stands in for GitHub's program gh: releases, each a folder of assets and its state."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from release.loopback import local_release

HUB = Path(os.environ["REHEARSAL"]) / "hub"
RELEASES = HUB / "releases"


def main() -> int:
    """Do what the command line asks of gh."""
    words = sys.argv[1:]
    if words[:1] == ["api"]:
        return api(words[1:])
    if words[:2] == ["workflow", "run"]:
        return dispatch(words[2:])
    if words[:1] != ["release"]:
        sys.exit(f"gh of the rehearsal: it cannot {' '.join(words[:2])}")
    options = release_parser().parse_intermixed_args(words[1:])
    folder = RELEASES / options.tag
    if options.verb == "create":
        return create(folder, options)
    if not folder.exists():
        print("release not found", file=sys.stderr)
        return 1
    if options.verb == "delete":
        shutil.rmtree(folder)
    elif options.verb == "edit":
        write_state(folder, read_state(folder) | {"draft": options.draft != "false"})
    else:
        print(str(read_state(folder)["draft"]).lower())
    return 0


def release_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gh release")
    parser.add_argument("verb", choices=["create", "delete", "edit", "view"])
    parser.add_argument("tag")
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--draft", nargs="?", const="true")
    parser.add_argument("--verify-tag", action="store_true")
    parser.add_argument("--yes", action="store_true")
    parser.add_argument("--title")
    parser.add_argument("--notes-file", type=Path)
    parser.add_argument("--prerelease", choices=["true", "false"])
    parser.add_argument("--json", choices=["isDraft"])
    parser.add_argument("--jq", choices=[".isDraft"])
    return parser


def create(folder: Path, options: argparse.Namespace) -> int:
    assets = folder / "assets"
    assets.mkdir(parents=True)
    for path in options.files:
        shutil.copy(path, assets)
    shutil.copy(options.notes_file, folder / "notes.md")
    pre_release = options.prerelease == "true"
    write_state(folder, {"draft": options.draft == "true", "prerelease": pre_release})
    return 0


def dispatch(words: list[str]) -> int:
    """Note a workflow that shall run, by its file and the branch; the rehearsal then runs it."""
    parser = argparse.ArgumentParser(prog="gh workflow run")
    parser.add_argument("workflow")
    parser.add_argument("--ref", required=True)
    options = parser.parse_args(words)
    with (HUB / "dispatched.jsonl").open("a") as stream:
        stream.write(json.dumps([options.workflow, options.ref]) + "\n")
    return 0


def api(words: list[str]) -> int:
    """Print the pages of the list of releases."""
    if "--slurp" not in words or not words[-1].endswith("/releases?per_page=100"):
        sys.exit(f"gh of the rehearsal: it cannot api {' '.join(words)}")
    releases = [
        local_release(folder / "assets", folder.name, address(folder)) | read_state(folder)
        for folder in sorted(RELEASES.glob("*"))
    ]
    print(json.dumps([releases]))
    return 0


def address(folder: Path) -> str:
    return f"{os.environ['REHEARSAL_URL']}/hub/releases/{folder.name}/assets"


def read_state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return state


def write_state(folder: Path, state: dict[str, Any]) -> None:
    (folder / "state.json").write_text(json.dumps(state) + "\n")


if __name__ == "__main__":
    sys.exit(main())
