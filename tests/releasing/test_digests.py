# SPDX-License-Identifier: BSD-3-Clause
"""What is signed and uploaded is what was built, and an upload can be repeated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from release_files import make_sdist, make_wheel

from release.__main__ import main
from release.distributions import sha256
from release.loopback import serving


def outputs(*folders: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what build jobs said, as the workflow joins it; a machine without a job is empty."""
    said = []
    for folder in folders:
        assert main(["digests", str(folder), "--name", "x"]) == 0
        said.append(capsys.readouterr().out.removeprefix("x=").strip())
    return " ".join([*said, ""])


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    """What the draft downloads: an sdist and two wheels."""
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
    """As the GPU job could replace it, which is on a machine of one's own."""
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


# --- release unpublished


def page(folder: Path, *files: Path, text: str | None = None) -> Path:
    """Write what an index says of the project."""
    listed = [{"filename": path.name, "hashes": {"sha256": sha256(path)}} for path in files]
    place = folder / "simple" / "flash-dmattn"
    place.mkdir(parents=True)
    (place / "index.json").write_text(text or json.dumps({"files": listed}))
    return folder


def unpublished(dist: Path, served: Path, output: Path) -> int:
    with serving(served) as server:
        index = f"{server.url}/simple/"
        return main(["unpublished", str(dist), "--index", index, "--output", str(output)])


def test_a_new_project_has_nothing(
    dist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = tmp_path / "served"
    served.mkdir()
    assert unpublished(dist, served, tmp_path / "upload") == 0
    assert capsys.readouterr().out == "count=3\n"
    names = {path.name for path in (tmp_path / "upload").iterdir()}
    assert names == {path.name for path in dist.iterdir()}


def test_the_rest_of_a_failed_upload_is_left(
    dist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *rest = sorted(dist.iterdir())
    assert unpublished(dist, page(tmp_path / "served", first), tmp_path / "upload") == 0
    assert capsys.readouterr().out == "count=2\n"
    assert sorted(path.name for path in (tmp_path / "upload").iterdir()) == [p.name for p in rest]


def test_after_a_whole_upload_nothing_is_left(
    dist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = page(tmp_path / "served", *dist.iterdir())
    assert unpublished(dist, served, tmp_path / "upload") == 0
    assert capsys.readouterr().out == "count=0\n"


def test_a_published_file_is_never_replaced(
    dist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = page(tmp_path / "served", *dist.iterdir())
    wheel = sorted(dist.glob("*.whl"))[0]
    before = sha256(wheel)
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    assert unpublished(dist, served, tmp_path / "upload") == 1
    assert f"{wheel.name} is published with the sha256 {before}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["<html>", "[]", '{"files": [{}]}'])
def test_an_index_that_lists_no_files_stops_the_upload(
    text: str, dist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert unpublished(dist, page(tmp_path / "served", text=text), tmp_path / "upload") == 1
    assert "does not list files" in capsys.readouterr().err


def test_an_address_without_encryption_is_not_asked(
    dist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = "http://index.example/simple/"
    assert main(["unpublished", str(dist), "--index", address, "--output", str(tmp_path)]) == 1
    assert "neither https nor this machine" in capsys.readouterr().err
