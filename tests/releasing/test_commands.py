# SPDX-License-Identifier: BSD-3-Clause
"""The shell commands of the workflows, with other programs in the place of docker and gh."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from release.__main__ import VERBS, main

ROOT = Path(__file__).resolve().parents[2]
RELEASE = (sys.executable, "-m", "release")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def make_program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)


def call(programs: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(programs / "calls"),
        **variables,
    }
    return subprocess.run(
        command,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def calls(programs: Path) -> str:
    return (programs / "calls").read_text()


# --- scripts/in_image


def test_commands_run_in_the_image_in_this_folder(programs: Path) -> None:
    make_program(programs, "docker", 'printf "%s\\n" "$@" >"$CALLS"')
    done = call(
        programs, "scripts/in_image", "quay.io/a@sha256:0", "python", "x.py", "--archs", "80 90"
    )
    assert done.returncode == 0, done.stderr
    words = calls(programs).splitlines()
    assert f"{ROOT}:{ROOT}" in words
    assert "quay.io/a@sha256:0" in words
    assert words[-5:] == ["in_image", "python", "x.py", "--archs", "80 90"]
    assert "--require-hashes" in calls(programs)


def test_what_runs_in_the_image_is_valid_shell(programs: Path, tmp_path: Path) -> None:
    # docker run ... IMAGE bash -c SCRIPT NAME COMMAND...
    make_program(programs, "docker", 'while [[ $1 != bash ]]; do shift; done; bash -n -c "$3"')
    assert call(programs, "scripts/in_image", "image", "true").returncode == 0


def test_an_image_alone_is_no_command(programs: Path) -> None:
    done = call(programs, "scripts/in_image", "quay.io/a")
    assert done.returncode == 64
    assert "usage:" in done.stderr


# --- the release tool


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_tells_what_it_takes(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    if verb == "conda":
        pytest.importorskip("rattler_build")
    if verb == "gates":
        pytest.importorskip("elftools")
    with pytest.raises(SystemExit) as done:
        main([verb, "--help"])
    assert done.value.code == 0
    told = capsys.readouterr().out
    assert f"usage: python -m release {verb} " in told
    assert (import_module(f"release.{verb}").__doc__ or "-").strip() in told


@pytest.mark.parametrize("verb", sorted(set(VERBS) - {"conda", "gates"}))
def test_other_verbs_need_the_standard_library_only(verb: str, programs: Path) -> None:
    done = call(programs, sys.executable, "-S", *RELEASE[1:], verb, "--help")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [[], ["absent"], ["--cuda", "13"]])
def test_what_is_no_verb_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(words)
    assert done.value.code == 2
    assert "VERB" in capsys.readouterr().err


# --- release matrix


def test_jobs_are_outputs_of_a_workflow(programs: Path) -> None:
    done = call(programs, *RELEASE, "matrix", "--small")
    assert done.returncode == 0, done.stderr
    assert [line.partition("=")[0] for line in done.stdout.splitlines()] == [
        *("packs", "wheels", "cpu_wheels", "tests", "build"),
        *(["epoch"] if (ROOT / ".git").exists() else []),
    ]


# --- release draft

GH = """echo "$@" >>"$CALLS"
if [[ $2 == view ]]; then [[ $STATE != absent ]] && echo "$STATE"; fi"""


def draft(
    programs: Path, state: str, pre_release: str = "false"
) -> subprocess.CompletedProcess[str]:
    make_program(programs, "gh", GH)
    folder = programs.parent / "dist"
    folder.mkdir(exist_ok=True)
    (folder / "a.whl").touch()
    arguments = ["v2.0.0", "notes.md", str(folder), "--pre-release", pre_release]
    return call(programs, *RELEASE, "draft", *arguments, STATE=state)


def test_a_draft_is_made_from_the_tag(programs: Path) -> None:
    assert draft(programs, "absent", "true").returncode == 0
    view, create = calls(programs).splitlines()
    assert view.startswith("release view v2.0.0")
    assert create.startswith(
        "release create v2.0.0 --draft --verify-tag --title flash-dmattn 2.0.0"
    )
    assert "--prerelease=true" in create
    assert create.endswith("/dist/a.whl")


def test_a_draft_that_was_left_is_replaced(programs: Path) -> None:
    assert draft(programs, "true").returncode == 0
    assert "release delete v2.0.0 --yes" in calls(programs)


def test_a_published_release_is_never_replaced(programs: Path) -> None:
    done = draft(programs, "false")
    assert done.returncode == 1
    assert "a release is never replaced" in done.stderr
    assert len(calls(programs).splitlines()) == 1


@pytest.mark.parametrize("pre_release", ["", "yes"])
def test_a_draft_must_know_what_it_is(programs: Path, pre_release: str) -> None:
    assert draft(programs, "absent", pre_release).returncode == 2


# --- scripts/check_sdist


@pytest.mark.parametrize("way", ["namespace", "root", "sudo"])
def test_the_sdist_is_built_without_a_network(way: str, programs: Path, tmp_path: Path) -> None:
    """By whatever lets it cut the network off; a fake Python stands for pip and ends the script."""
    allowed = {"namespace": '"$1" = --map-root-user', "root": '"$1" = --net', "sudo": "-n $SUDO"}
    make_program(
        programs,
        "unshare",
        f'[[ {allowed[way]} ]] || exit 1\n[[ $1 = --net ]] || shift\nshift\nCUT=yes exec "$@"',
    )
    make_program(
        programs, "sudo", 'while [[ $1 = --* ]]; do shift; done\nSUDO=yes PATH=$PATH exec "$@"'
    )
    make_program(programs, "setpriv", 'while [[ $1 != env ]]; do shift; done\nexec "$@"')
    make_program(programs, "python", 'echo "$CUT $1 $2 $3" >"$CALLS"\nexit 7')
    sdist = tmp_path / "x.tar.gz"
    sdist.touch()
    done = call(programs, "scripts/check_sdist", str(sdist), PYTHON="python", SUDO="", CUT="")
    assert done.returncode == 7, done.stderr
    assert calls(programs) == "yes -m pip wheel\n"


def test_an_sdist_that_could_fetch_is_not_checked(programs: Path, tmp_path: Path) -> None:
    make_program(programs, "unshare", "exit 1")
    make_program(programs, "sudo", "exit 1")
    make_program(programs, "python", 'touch "$CALLS"')
    sdist = tmp_path / "x.tar.gz"
    sdist.touch()
    done = call(programs, "scripts/check_sdist", str(sdist), PYTHON="python")
    assert done.returncode == 1
    assert "this machine lets nobody cut off the network" in done.stderr
    assert not (programs / "calls").exists()


# --- scripts/rehearse_workflows


@pytest.mark.parametrize(
    ("unshare", "status"), [("exit 0", 0), ("exit 1", 1), ("[[ $1 == --user ]]", 0)]
)
def test_a_machine_that_refuses_mounts_is_told_what_it_lacks(
    unshare: str, status: int, programs: Path
) -> None:
    """Before anything is downloaded, and so that .ci/run can go on without the rehearsal."""
    make_program(programs, "unshare", unshare)
    done = call(programs, "scripts/rehearse_workflows", "--check")
    assert done.returncode == status, done.stderr
    assert ("capability SYS_ADMIN or user namespaces" in done.stderr) == bool(status)
    assert "docker run --cap-add SYS_ADMIN" in done.stderr or not status


# --- scripts/try_oldest


def test_the_wheel_is_tried_in_an_image_of_its_policy(programs: Path, tmp_path: Path) -> None:
    """Elsewhere it would be tried on another glibc than the one that its tag promises."""
    wheel = tmp_path / "x.whl"
    wheel.touch()
    make_program(programs, "python", f'exec {sys.executable} "$@"')
    for policy in ("", "manylinux_2_34"):
        done = call(programs, "scripts/try_oldest", str(wheel), AUDITWHEEL_POLICY=policy)
        assert done.returncode == 1
        assert f"no image of manylinux_2_28, but of '{policy}'" in done.stderr
