# SPDX-License-Identifier: BSD-3-Clause
"""The rehearsal's decisions and refusals; .ci/run runs all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from release import rehearse
from release.__main__ import main
from release.project import ReleaseError
from release.rehearse import Rehearsal, chosen_cuda
from release.trial import check_taken

URL = "http://127.0.0.1:1/files/flash_dmattn.whl"


def test_cuda_is_that_of_the_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearse, "find_nvcc", lambda named: Path("/cuda/bin/nvcc"))
    monkeypatch.setattr(rehearse, "cuda_version", lambda nvcc: "13.1")
    assert chosen_cuda("auto") == "13"
    assert chosen_cuda("12") == "12"
    assert chosen_cuda("none") is None


def test_without_an_nvcc_only_the_cpu_pack_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find_nvcc(named: str | None) -> Path:
        raise ReleaseError("no nvcc was found")

    monkeypatch.setattr(rehearse, "find_nvcc", find_nvcc)
    assert chosen_cuda("auto") is None
    assert "the cpu pack only: no nvcc was found" in capsys.readouterr().out


def report(url: str = URL, digest: str = "a", **others: str) -> dict[str, Any]:
    entries = {"flash-dmattn": url, **others}
    return {
        "install": [
            {
                "metadata": {"name": name},
                "download_info": {"url": place, "archive_info": {"hashes": {"sha256": digest}}},
            }
            for name, place in entries.items()
        ]
    }


def test_the_wheel_of_the_index_is_taken() -> None:
    check_taken(report(), URL, "a")


@pytest.mark.parametrize(
    ("taken", "message"),
    [
        (report(url="https://pypi.org/flash_dmattn.whl"), "pip installed .*pypi.org"),
        (report(digest="b"), "pip installed .*'b'"),
        (report(torch="https://pypi.org/torch.whl"), "pip replaced torch by https://pypi.org"),
    ],
)
def test_anything_else_is_refused(taken: dict[str, Any], message: str) -> None:
    with pytest.raises(ReleaseError, match=message):
        check_taken(taken, URL, "a")


def test_what_was_made_is_kept_as_far_as_it_came(tmp_path: Path) -> None:
    work = Rehearsal(tmp_path / "work", "13", "90", "64")
    work.work.mkdir()
    rehearse.keep(work, tmp_path / "first")
    assert [path.name for path in (tmp_path / "first").iterdir()] == ["rehearsal.json"]
    work.dist.mkdir(parents=True)
    (work.dist / "a.whl").touch()
    (work.work / "gates.json").touch()
    rehearse.keep(work, tmp_path / "second")
    kept = {str(p.relative_to(tmp_path / "second")) for p in (tmp_path / "second").rglob("*.*")}
    assert kept == {"files/a.whl", "gates.json", "rehearsal.json"}


def test_a_failed_step_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rehearse, "check_tag", fail)
    assert main(["rehearse", "--cuda", "none", "--output", str(tmp_path / "kept")]) == 1
    assert "release rehearse: no section" in capsys.readouterr().err
    assert (tmp_path / "kept" / "rehearsal.json").is_file()


def fail(tag: str, *, dated: bool) -> str:
    raise ReleaseError("no section")
