# SPDX-License-Identifier: BSD-3-Clause
"""Stands in for GitHub's program gh. A release is a folder of assets and a state.

Branches are those of the rehearsed clone. Pull requests are lines of pulls.jsonl.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rehearsal.source import IDENTITY
from release.loopback import local_release
from release.programs import output

HUB = Path(os.environ["REHEARSAL"]) / "hub"
RELEASES = HUB / "releases"
PULLS = HUB / "pulls.jsonl"
REPOSITORY = HUB.parent / "repository"


def main() -> int:
    """Run one of the supported gh commands."""
    words = sys.argv[1:]
    if words[:1] == ["api"]:
        return api(words[1:])
    if words[:2] == ["workflow", "run"]:
        return dispatch(words[2:])
    if words[:1] == ["pr"]:
        return pull_requests(words[1:])
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
    """Record a workflow to run, by its file and the branch; the rehearsal runs it later."""
    parser = argparse.ArgumentParser(prog="gh workflow run")
    parser.add_argument("workflow")
    parser.add_argument("--ref", required=True)
    options = parser.parse_args(words)
    with (HUB / "dispatched.jsonl").open("a") as stream:
        stream.write(json.dumps([options.workflow, options.ref]) + "\n")
    return 0


def pull_requests(words: list[str]) -> int:
    """Record a pull request, or print the recorded ones."""
    parser = argparse.ArgumentParser(prog="gh pr")
    parser.add_argument("verb", choices=["create", "list"])
    for name in ("head", "base", "title", "body", "state", "json"):
        parser.add_argument(f"--{name}")
    options = parser.parse_args(words)
    if options.verb == "list":
        lines = PULLS.read_text().splitlines() if PULLS.exists() else []
        print(json.dumps([pull for pull in map(json.loads, lines) if pull[1] == options.head]))
        return 0
    with PULLS.open("a") as stream:
        stream.write(json.dumps([options.base, options.head]) + "\n")
    return 0


def api(words: list[str]) -> int:
    """Print the pages of the list of releases, or read and write branches of the repository."""
    parser = argparse.ArgumentParser(prog="gh api")
    parser.add_argument("--method", default="GET")
    parser.add_argument("--paginate", action="store_true")
    parser.add_argument("--slurp", action="store_true")
    parser.add_argument("-f", "-F", dest="fields", action="append", default=[])
    parser.add_argument("path")
    options = parser.parse_args(words)
    path = options.path.split("/", 3)[-1]
    fields = dict(field.split("=", 1) for field in options.fields)
    if options.slurp and path == "releases?per_page=100":
        print(json.dumps([all_releases()]))
    elif path.startswith("git/"):
        print(json.dumps(references(options.method, path.removeprefix("git/"), fields)))
    elif path.startswith("contents/"):
        print(json.dumps(contents(options.method, path.removeprefix("contents/"), fields)))
    else:
        sys.exit(f"gh of the rehearsal: it cannot api {' '.join(words)}")
    return 0


def all_releases() -> list[dict[str, Any]]:
    return [
        local_release(folder / "assets", folder.name, address(folder)) | read_state(folder)
        for folder in sorted(RELEASES.glob("*"))
    ]


def references(method: str, path: str, fields: Mapping[str, str]) -> Any:
    """Return a branch or the branches with a prefix, or set a branch."""
    if method != "GET":
        git("update-ref", fields.get("ref", path), fields["sha"])
        return {}
    kind, _, name = path.partition("/")
    form = '{"ref":"%(refname)","object":{"sha":"%(objectname)"}}'
    pattern = f"refs/{name}{'*' if kind == 'matching-refs' else ''}"
    found = list(map(json.loads, git("for-each-ref", f"--format={form}", pattern).splitlines()))
    return found if kind == "matching-refs" else found[0]


def contents(method: str, path: str, fields: Mapping[str, str]) -> dict[str, str]:
    """Return a file of a branch, or commit a file to it."""
    if method == "GET":
        name, _, branch = path.partition("?ref=")
        place = f"{branch}:{name}"
        text = git("cat-file", "blob", place).encode()
        sha = git("rev-parse", place).strip()
        return {"sha": sha, "content": base64.b64encode(text).decode()}
    branch = fields["branch"]
    if git("rev-parse", f"{branch}:{path}").strip() != fields["sha"]:
        sys.exit(f"gh of the rehearsal: {path} of {branch} is not {fields['sha']}")
    work = HUB / "branch"
    git("worktree", "add", "--quiet", str(work), branch)
    (work / path).write_bytes(base64.b64decode(fields["content"]))
    git(*IDENTITY, "commit", "--quiet", "--all", "--message", fields["message"], folder=work)
    git("worktree", "remove", str(work))
    return {}


def git(*words: str, folder: Path = REPOSITORY) -> str:
    return output(["git", "-C", folder, *words])


def address(folder: Path) -> str:
    return f"{os.environ['REHEARSAL_URL']}/hub/releases/{folder.name}/assets"


def read_state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return state


def write_state(folder: Path, state: dict[str, Any]) -> None:
    (folder / "state.json").write_text(json.dumps(state) + "\n")


if __name__ == "__main__":
    sys.exit(main())
