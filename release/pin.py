# SPDX-License-Identifier: BSD-3-Clause
"""Opens a pull request that commits the digests of the images in which a run built the wheels.

Needs the gh program, GH_TOKEN and GITHUB_REPOSITORY. Updates the pull request if it is open. Does
nothing if the committed digests are the same.
"""

from __future__ import annotations

import argparse
import base64
import json
import os

from release.build_record import images_of_jobs, parse_jobs
from release.matrix import LOCK, lock_text
from release.programs import call, output
from release.project import ROOT

BRANCH = "pin-images"
TITLE = "Pin the digests of the build images"
BODY = """\
The nightly run built the wheels in these images, which its first job had looked up.

GitHub starts no workflow for a pull request that a workflow opens: close and reopen it to run `ci`.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--build", required=True, help="the output `build` of `release matrix`")
    parser.add_argument("--base", default="main", help="the branch that shall get them")


def run(options: argparse.Namespace) -> None:
    """Open or update the pull request."""
    committed = json.loads(LOCK.read_text())
    digests = committed | images_of_jobs(parse_jobs(options.build))
    if digests == committed:
        print("release pin: every digest is committed")
        return
    text = lock_text(digests)
    repository = f"repos/{os.environ['GITHUB_REPOSITORY']}"
    refs = output(["gh", "api", f"{repository}/git/matching-refs/heads/{BRANCH}"])
    present = [ref for ref in json.loads(refs) if ref["ref"] == f"refs/heads/{BRANCH}"]
    if not present or file_of(repository)["content"] != text:
        start_branch(repository, options.base, exists=bool(present))
        commit(repository, text)
    listed = ["gh", "pr", "list", "--head", BRANCH, "--state", "open", "--json", "number"]
    if not json.loads(output(listed)):
        ends = ["--base", options.base, "--head", BRANCH]
        call(["gh", "pr", "create", *ends, "--title", TITLE, "--body", BODY])


def start_branch(repository: str, base: str, *, exists: bool) -> None:
    """Set the branch to the base's newest commit. An existing branch loses its own commits."""
    head = json.loads(output(["gh", "api", f"{repository}/git/ref/heads/{base}"]))
    sha = ["-f", f"sha={head['object']['sha']}"]
    branch = f"refs/heads/{BRANCH}"
    if exists:
        call(
            [
                "gh",
                "api",
                "--method",
                "PATCH",
                f"{repository}/git/{branch}",
                *sha,
                "-F",
                "force=true",
            ]
        )
    else:
        call(
            ["gh", "api", "--method", "POST", f"{repository}/git/refs", "-f", f"ref={branch}", *sha]
        )


def commit(repository: str, text: str) -> None:
    """Commit the file through GitHub's API, which signs the commit."""
    fields = {
        "message": TITLE,
        "branch": BRANCH,
        "content": base64.b64encode(text.encode()).decode(),
        "sha": file_of(repository)["sha"],
    }
    words = [word for key, value in fields.items() for word in ("-f", f"{key}={value}")]
    call(["gh", "api", "--method", "PUT", contents(repository), *words])


def file_of(repository: str) -> dict[str, str]:
    """Return the sha and the text of the file on the branch."""
    found = json.loads(output(["gh", "api", f"{contents(repository)}?ref={BRANCH}"]))
    return {"sha": found["sha"], "content": base64.b64decode(found["content"]).decode()}


def contents(repository: str) -> str:
    return f"{repository}/contents/{LOCK.relative_to(ROOT)}"
