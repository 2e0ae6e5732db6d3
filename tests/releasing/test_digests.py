# SPDX-License-Identifier: BSD-3-Clause
"""The signed and uploaded files are the built ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from release_files import make_sdist, make_wheel

from release.__main__ import main
from release.distributions import sha256


def outputs(*folders: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the build jobs' outputs, joined as in the workflow; an absent job's is empty."""
    said = []
    for folder in folders:
        assert main(["digests", str(folder), "--name", "x"]) == 0
        said.append(capsys.readouterr().out.removeprefix("x=").strip())
    return " ".join([*said, ""])


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    """Return the files that the draft job downloads: an sdist and two wheels."""
    folder = tmp_path / "dist"
    make_sdist(folder)
    make_wheel(folder)
    make_wheel(folder, machine="aarch64")
    return folder


@pytest.fixture
def built(dist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    jobs = []
    for number, path in enumerate(sorted(dist.iterdir())):
        jobs.append(tmp_path / str(number))
        jobs[-1].mkdir()
        shutil.copy(path, jobs[-1])
    return outputs(*jobs, capsys=capsys)


def test_what_was_built_passes(dist: Path, built: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["digests", str(dist), "--expected", built]) == 0
    assert capsys.readouterr().out == "3 files are what was built\n"


def test_a_replaced_artifact_is_found(
    dist: Path, built: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The GPU job on a self-hosted machine could replace it."""
    (wheel, *_) = sorted(dist.glob("*.whl"))
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    assert main(["digests", str(dist), "--expected", built]) == 1
    said = capsys.readouterr().err
    assert f"{wheel.name} has the sha256 {sha256(wheel)}" in said
    assert "an artifact was replaced after the build" in said


def test_a_file_more_or_less_is_found(
    dist: Path, built: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    extra = make_wheel(dist, machine="riscv64")
    assert main(["digests", str(dist), "--expected", built]) == 1
    assert f"{extra.name} has the sha256" in capsys.readouterr().err
    extra.unlink()
    sdist.unlink()
    assert main(["digests", str(dist), "--expected", built]) == 1
    assert f"{sdist.name} has the sha256 of no file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("", "say no hash"),
        ("  ", "say no hash"),
        ("x.whl=abc", "'x.whl=abc'"),
        (f"x.whl={'0' * 64} x.whl={'1' * 64}", f"'x.whl={'1' * 64}'"),
        (f"../x.whl={'0' * 64}", "'../x.whl="),
    ],
)
def test_outputs_that_say_nothing_are_refused(
    said: str, message: str, dist: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["digests", str(dist), "--expected", said]) == 1
    assert message in capsys.readouterr().err
