# SPDX-License-Identifier: BSD-3-Clause
"""The commit recorded in builds, also where git refuses to read the sources."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from release.project import ROOT, ReleaseError, commit, commit_time

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="no git")
ANOTHER = 54321  # a user other than the test's


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with one commit; the user's git configuration is not read."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "file").write_text("1")
    git(folder, "add", "file")
    git(folder, "commit", "-q", "-m", "first")
    return folder


@pytest.fixture
def of_another(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the repository as root in a container sees it: it belongs to another user."""
    if os.geteuid() == 0:
        for path in [checkout, *checkout.rglob("*")]:
            os.chown(path, ANOTHER, ANOTHER)
    else:
        monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    return checkout


def test_commit_tells_of_changes(checkout: Path) -> None:
    clean = commit(checkout)
    assert re.fullmatch("[0-9a-f]{40}", clean)
    assert (commit_time(checkout) or "").isdigit()
    (checkout / "file").write_text("2")
    assert commit(checkout) == f"{clean}-dirty"


def test_what_is_no_checkout_has_no_commit(checkout: Path) -> None:
    inside = checkout / "copied"
    inside.mkdir()
    assert commit(inside) == ""
    assert commit_time(inside) is None


def test_a_checkout_that_git_refuses_is_no_sdist(of_another: Path) -> None:
    with pytest.raises(ReleaseError, match=r"has a \.git, but .* failed: .*dubious ownership"):
        commit(of_another)
    with pytest.raises(ReleaseError, match="dubious ownership"):
        commit_time(of_another)


def test_a_checkout_without_git_is_no_sdist(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ReleaseError, match=r"has a \.git, but there is no program git"):
        commit(checkout)


def test_the_container_lets_git_read_it(of_another: Path) -> None:
    """This is the command of scripts/in_image, in an environment without other configuration."""
    text = (ROOT / "scripts" / "in_image").read_text()
    (command,) = re.findall(r"^  (git config .*)$", text, re.MULTILINE)
    assert text.index(command) < text.index('"$@"\n\'')
    subprocess.run(["bash", "-euc", command], cwd=of_another, check=True)
    assert re.fullmatch("[0-9a-f]{40}", commit(of_another))
