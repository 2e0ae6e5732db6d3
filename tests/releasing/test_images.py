# SPDX-License-Identifier: BSD-3-Clause
"""The image of a workflow's job, and the way of a digest into the tree."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from release import matrix
from release.__main__ import main

JOBS: matrix.Jobs = {
    "packs": [{"cuda": "13", "image": "quay.io/a"}, {"cuda": "12", "image": "quay.io/b"}],
    "wheels": [],
    "tests": [{"python": "3.10"}],
}
DIGEST, NEWER = (f"sha256:{digit * 64}" for digit in "01")


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the digests; one is missing."""
    path = tmp_path / "images.json"
    path.write_text(json.dumps({"quay.io/a": DIGEST}))
    monkeypatch.setattr(matrix, "LOCK", path)
    monkeypatch.setattr(matrix, "jobs", lambda *options: JOBS)
    monkeypatch.setattr(matrix, "commit_time", lambda: None)
    return path


def test_digests_take_the_place_of_names(
    lock: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["matrix"]) == 0
    done = capsys.readouterr()
    assert done.out == (
        f'packs=[{{"cuda":"13","image":"quay.io/a@{DIGEST}"}},{{"cuda":"12","image":"quay.io/b"}}]\n'
        "wheels=[]\n"
        'tests=[{"python":"3.10"}]\n'
        f'build={{"packs":[{{"cuda":"13","image":"quay.io/a@{DIGEST}"}},'
        '{"cuda":"12","image":"quay.io/b"}],"wheels":[]}\n'
    )
    assert "no digest in .github/images.json for quay.io/b" in done.err


def images(printed: str) -> list[str]:
    (line,) = [line for line in printed.splitlines() if line.startswith("packs=")]
    return [row["image"] for row in json.loads(line.removeprefix("packs="))]


@pytest.mark.parametrize(
    ("option", "asked", "expected"),
    [
        ("--resolve-digests", ["quay.io/b"], [f"quay.io/a@{DIGEST}", f"quay.io/b@{NEWER}"]),
        (
            "--newest-digests",
            ["quay.io/a", "quay.io/b"],
            [f"quay.io/a@{NEWER}", f"quay.io/b@{NEWER}"],
        ),
    ],
)
def test_a_run_asks_for_digests_once(
    option: str,
    asked: list[str],
    expected: list[str],
    lock: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    fake_docker(tmp_path, f'echo "$@" >>"{tmp_path}/calls"; echo {NEWER}', monkeypatch)
    before = lock.read_text()
    assert main(["matrix", option]) == 0
    done = capsys.readouterr()
    assert images(done.out) == expected
    assert done.err == ""
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[-1] for call in calls] == asked
    assert lock.read_text() == before


def test_a_run_without_a_digest_does_not_start(
    lock: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    fake_docker(tmp_path, 'echo "no such manifest" >&2; exit 1', monkeypatch)
    assert main(["matrix", "--resolve-digests"]) == 1
    done = capsys.readouterr()
    assert done.out == ""
    assert "no such manifest" in done.err


def test_what_is_no_digest_is_refused(
    lock: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock.write_text(json.dumps({"quay.io/a": "latest"}))
    assert main(["matrix"]) == 1
    assert "'latest' is not a digest of quay.io/a" in capsys.readouterr().err


def fake_docker(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    docker = folder / "docker"
    docker.write_text(f"#!/bin/sh\n{script}\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_update_asks_the_registry(
    lock: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_docker(tmp_path, f'echo "$@" >>"{tmp_path}/calls"; echo {DIGEST}', monkeypatch)
    lock.unlink()
    assert main(["matrix", "--update-digests"]) == 0
    assert json.loads(lock.read_text()) == {"quay.io/a": DIGEST, "quay.io/b": DIGEST}
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[-1] for call in calls] == ["quay.io/a", "quay.io/b"]


def test_an_update_that_fails_changes_nothing(
    lock: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_docker(tmp_path, 'echo "no such manifest" >&2; exit 1', monkeypatch)
    before = lock.read_text()
    assert main(["matrix", "--update-digests"]) == 1
    assert "no such manifest" in capsys.readouterr().err
    assert lock.read_text() == before


def test_committed_digests_are_digests() -> None:
    for image, digest in json.loads(matrix.LOCK.read_text()).items():
        assert re.fullmatch(r"quay\.io/[\w./-]+", image)
        assert matrix.DIGEST.fullmatch(digest)
