# SPDX-License-Identifier: BSD-3-Clause
"""Which image a workflow's job gets."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path

import pytest

import pin_images

PLAN = {
    "packs": [{"cuda": "13", "image": "quay.io/a"}, {"cuda": "12", "image": "quay.io/b"}],
    "tests": [{"python": "3.10"}],
}
DIGEST = "sha256:" + "0" * 64


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(PLAN)))
    return pin_images.main(arguments)


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "images.json"
    path.write_text(json.dumps({"quay.io/a": DIGEST}))
    return path


def test_digests_take_the_place_of_names(
    lock: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--lock", str(lock)) == 0
    done = capsys.readouterr()
    assert done.out == (
        f'packs=[{{"cuda":"13","image":"quay.io/a@{DIGEST}"}},{{"cuda":"12","image":"quay.io/b"}}]\n'
        'tests=[{"python":"3.10"}]\n'
    )
    assert "no digest in .github/images.json for quay.io/b" in done.err


def test_a_release_takes_no_unpinned_image(
    lock: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--lock", str(lock), "--require") == 1
    done = capsys.readouterr()
    assert done.out == ""
    assert "for quay.io/b; see docs/release.md" in done.err


def test_what_is_no_digest_is_refused(
    lock: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock.write_text(json.dumps({"quay.io/a": "latest"}))
    assert run(monkeypatch, "--lock", str(lock)) == 1
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
    assert run(monkeypatch, "--lock", str(lock), "--update") == 0
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
    assert run(monkeypatch, "--lock", str(lock), "--update") == 1
    assert "no such manifest" in capsys.readouterr().err
    assert lock.read_text() == before


def test_committed_digests_are_digests() -> None:
    for image, digest in json.loads(pin_images.LOCK.read_text()).items():
        assert re.fullmatch(r"quay\.io/[\w./-]+", image)
        assert pin_images.DIGEST.fullmatch(digest)
