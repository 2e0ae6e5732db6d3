# SPDX-License-Identifier: BSD-3-Clause
"""A release's record of its build, and the pull request that pins its images."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
from release_files import CPU, CU13, make_sdist, make_wheel

from release import matrix, pin
from release.__main__ import main
from release.build_record import build_record, parse_jobs
from release.distributions import sha256
from release.project import ReleaseError, pyproject_value

OLD, NEW = (f"sha256:{digit * 64}" for digit in "01")
VERSION = pyproject_value("version")


def jobs(image: str = f"quay.io/cuda@{NEW}") -> str:
    packs = [{"cuda": "13", "artifact": "packs-cu13-x86_64", "image": image}]
    wheels = [{"artifact": "wheel-x86_64", "image": f"quay.io/plain@{OLD}"}]
    return json.dumps({"packs": packs, "wheels": wheels})


# --- the record


def test_record_tells_how_each_file_was_made(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, packs=(CU13, CPU))
    sdist = make_sdist(tmp_path)
    record = build_record([wheel, sdist], jobs(), "c" * 40, "1700000000")
    assert record == {
        "schema": 1,
        "commit": "c" * 40,
        "source_date_epoch": 1700000000,
        "jobs": json.loads(jobs()),
        "files": [
            {
                "name": wheel.name,
                "sha256": sha256(wheel),
                "packs": [
                    {"file": CPU["file"], "sha256": CPU["sha256"]},
                    {"file": CU13["file"], "sha256": CU13["sha256"]},
                ],
            },
            {"name": sdist.name, "sha256": sha256(sdist)},
        ],
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "are no JSON"),
        ("[]", "must have the members packs, wheels"),
        ('{"packs": []}', "must have the members packs, wheels"),
        (jobs("quay.io/cuda"), "built in quay.io/cuda, which has no digest"),
        (jobs("quay.io/cuda@latest"), "which has no digest"),
    ],
)
def test_what_cannot_be_built_again_is_refused(text: str, message: str) -> None:
    with pytest.raises(ReleaseError, match=message):
        parse_jobs(text)


def test_record_is_an_asset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    make_wheel(tmp_path / "dist", VERSION)
    make_sdist(tmp_path / "dist", VERSION)
    options = ["--notes", str(tmp_path / "notes.md"), "--commit", "c" * 40, "--build", jobs()]
    assert main(["assets", str(tmp_path / "dist"), *options]) == 0
    name = f"flash-dmattn-{VERSION}.build.json"
    assert json.loads((tmp_path / "dist" / name).read_text())["jobs"] == json.loads(jobs())
    assert name in (tmp_path / "dist" / "SHA256SUMS").read_text()


# --- the pull request

GH = """#!/usr/bin/env python3
import json, os, sys
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
answers = json.loads(os.environ["ANSWERS"])
print(json.dumps(answers.get(next((key for key in answers if key in sys.argv[-1]), ""), [])))
"""


class Repository:
    """A fake gh program in place of GitHub, which records its calls."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls_file = folder / "calls"
        self.lock = folder / "images.json"
        self.monkeypatch = monkeypatch
        gh = folder / "gh"
        gh.write_text(GH)
        gh.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("CALLS", str(self.calls_file))
        monkeypatch.setenv("GITHUB_REPOSITORY", "a/b")
        monkeypatch.setattr(pin, "LOCK", self.lock)
        monkeypatch.setattr(pin, "ROOT", folder)
        self.write({"quay.io/plain": OLD})

    def write(self, digests: dict[str, str]) -> None:
        self.lock.write_text(matrix.lock_text(digests))

    def answer(self, branch: dict[str, str] | None, *, is_open: bool) -> None:
        """Set the branch's content, if it exists, and whether its pull request is open."""
        content = base64.b64encode(matrix.lock_text(branch or {}).encode()).decode()
        answers = {
            "matching-refs": [{"ref": f"refs/heads/{pin.BRANCH}"}] if branch is not None else [],
            "git/ref/heads/main": {"object": {"sha": "5" * 40}},
            "contents/": {"sha": "6" * 40, "content": content},
            "number": [{"number": 7}] if is_open else [],
        }
        self.monkeypatch.setenv("ANSWERS", json.dumps(answers))

    def changes(self) -> list[list[str]]:
        """Return the calls that change something."""
        if not self.calls_file.exists():
            return []
        asked: list[list[str]] = [json.loads(line) for line in self.calls_file.open()]
        return [words for words in asked if "--method" in words or "create" in words]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    return Repository(tmp_path, monkeypatch)


def fields(words: list[str]) -> dict[str, Any]:
    return dict(words[i + 1].split("=", 1) for i, word in enumerate(words) if word in ("-f", "-F"))


def test_digests_that_are_committed_need_no_request(repository: Repository) -> None:
    repository.write({"quay.io/plain": OLD, "quay.io/cuda": NEW})
    assert main(["pin", "--build", jobs()]) == 0
    assert repository.changes() == []


def test_new_digests_come_by_a_pull_request(repository: Repository) -> None:
    repository.answer(None, is_open=False)
    assert main(["pin", "--build", jobs()]) == 0
    branch, change, request = repository.changes()
    assert branch[:4] == ["api", "--method", "POST", "repos/a/b/git/refs"]
    assert fields(branch) == {"ref": "refs/heads/pin-images", "sha": "5" * 40}
    assert change[:4] == ["api", "--method", "PUT", "repos/a/b/contents/images.json"]
    assert fields(change)["sha"] == "6" * 40
    assert fields(change)["branch"] == "pin-images"
    written = json.loads(base64.b64decode(fields(change)["content"]))
    assert written == {"quay.io/plain": OLD, "quay.io/cuda": NEW}
    assert request[:6] == ["pr", "create", "--base", "main", "--head", "pin-images"]


def test_an_open_request_gets_newer_digests(repository: Repository) -> None:
    repository.answer({"quay.io/cuda": OLD}, is_open=True)
    assert main(["pin", "--build", jobs()]) == 0
    branch, change = repository.changes()
    assert branch[:4] == ["api", "--method", "PATCH", "repos/a/b/git/refs/heads/pin-images"]
    assert fields(branch) == {"sha": "5" * 40, "force": "true"}
    assert fields(change)["branch"] == "pin-images"


def test_an_open_request_with_these_digests_is_left_alone(repository: Repository) -> None:
    repository.answer({"quay.io/plain": OLD, "quay.io/cuda": NEW}, is_open=True)
    assert main(["pin", "--build", jobs()]) == 0
    assert repository.changes() == []
