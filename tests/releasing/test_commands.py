# SPDX-License-Identifier: BSD-3-Clause
"""The workflows' shell commands, with fake programs in place of docker and gh."""

from __future__ import annotations

import os
import shutil
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


# --- scripts/setup_venv

PIP = """case "$*" in
  *" list "*) cat "$CALLS" ;;
  *"install --quiet torch"*) printf '%s\\n' torch==2.4.1+cpu transformers==4.57.6 >"$CALLS" ;;
  *" install "*) printf '%s\\n' $BROUGHT >"$CALLS" ;;
  *find_spec*) exit 1 ;;
esac"""


@pytest.mark.parametrize(
    ("brought", "status"),
    [
        ("torch==2.4.1+cpu transformers==4.57.6", 0),
        ("torch==2.4.1+cpu transformers==5.0.0", 1),
        ("torch==2.6.0 transformers==4.57.6", 1),
        ("torch==2.4.1+cpu", 1),
    ],
)
def test_what_was_asked_for_is_what_is_tested(brought: str, status: int, programs: Path) -> None:
    """pip replaces a requested version if another package needs a newer one."""
    make_program(programs, "python", PIP)
    done = call(
        programs,
        *("scripts/setup_venv", "x.whl[test]"),
        FDM_VENV=str(programs.parent),
        FDM_TORCH="torch==2.4.* transformers==4.57.*",
        BROUGHT=brought,
    )
    assert done.returncode == status, done.stderr
    assert ("error: FDM_TORCH gave t" in done.stderr) == bool(status)


# --- scripts/check_sdist


@pytest.mark.parametrize("way", ["namespace", "root", "sudo"])
def test_the_sdist_is_built_without_a_network(way: str, programs: Path, tmp_path: Path) -> None:
    """unshare cuts off the network in each permitted way; a fake Python ends the script."""
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
    """The message comes before any download, and .ci/run can continue without the rehearsal."""
    make_program(programs, "unshare", unshare)
    done = call(programs, "scripts/rehearse_workflows", "--check")
    assert done.returncode == status, done.stderr
    assert ("capability SYS_ADMIN or user namespaces" in done.stderr) == bool(status)
    assert "docker run --cap-add SYS_ADMIN" in done.stderr or not status


# --- scripts/changed


def git(folder: Path, *arguments: str, days: int = 0) -> None:
    """Call git; commits are dated this many days after 1 January 2020."""
    date = f"{1577836800 + days * 86400} +0000"
    names = {
        f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    environment = {**os.environ, **names, "GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    subprocess.run(["git", *arguments], cwd=folder, env=environment, check=True)


def commit(folder: Path, name: str, *, days: int) -> None:
    (folder / name).write_text(f"{days}")
    git(folder, "add", name)
    git(folder, "commit", "--quiet", "--message", name, days=days)


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """Return a repository with scripts/changed and one commit of a file "old"."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "changed", tmp_path / "scripts")
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    git(tmp_path, "add", "scripts")
    commit(tmp_path, "old", days=0)
    return tmp_path


def changed(folder: Path, *paths: str, base: str = "") -> bool:
    environment = {**os.environ, "FDM_CI_BASE": base}
    done = subprocess.run(["scripts/changed", *paths], cwd=folder, env=environment, check=False)
    assert done.returncode in (0, 1)
    return done.returncode == 0


def test_what_changed_in_the_last_days_has_changed(history: Path) -> None:
    commit(history, "earlier", days=10)
    commit(history, "later", days=12)
    assert not changed(history, "old")
    assert changed(history, "earlier")
    assert changed(history, "old", "later")
    (history / "old").write_text("not committed")
    assert changed(history, "old")


def test_what_a_branch_changed_has_changed(history: Path, tmp_path: Path) -> None:
    commit(history, "earlier", days=10)
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", str(history), str(clone))
    git(clone, "checkout", "--quiet", "-b", "branch")
    commit(clone, "mine", days=30)
    assert not changed(clone, "earlier")
    assert changed(clone, "mine")
    assert changed(clone, "earlier", base="HEAD~2")
    assert not changed(clone, "mine", base="HEAD")


def test_what_git_cannot_tell_has_changed(history: Path) -> None:
    assert changed(history, "old")  # all commits are recent
    commit(history, "later", days=10)
    assert not changed(history, "old")
    assert changed(history, "old", base="0" * 40)
    shutil.rmtree(history / ".git")
    assert changed(history, "old")


# --- scripts/timed


def test_steps_are_timed_and_summed_without_downloads(tmp_path: Path, programs: Path) -> None:
    path = str(tmp_path / "new" / "durations.tsv")

    def timed(*command: str) -> subprocess.CompletedProcess[str]:
        return call(programs, "scripts/timed", *command, FDM_DURATIONS=path)

    script = "for ((i = 0; i < 200000; i++)); do :; done; echo out; echo err >&2"
    done = timed("work", "bash", "-c", script)
    assert (done.returncode, done.stdout) == (0, "out\n")
    assert done.stderr == "=== work\nerr\n"
    assert timed("download it", "sleep", "0.3").returncode == 0
    assert timed("bad", "false").returncode == 1
    lines = [line.split("\t") for line in Path(path).read_text().splitlines()]
    assert [name for *_, name in lines] == ["work", "download it", "bad"]
    assert float(lines[0][1]) > 0
    assert float(lines[1][0]) >= 0.3
    shown = timed().stdout.splitlines()
    assert len(shown) == 4
    assert float(shown[3].split()[0]) == pytest.approx(float(lines[0][0]), abs=0.11)


# --- scripts/try_oldest


def test_the_wheel_is_tried_in_an_image_of_its_policy(programs: Path, tmp_path: Path) -> None:
    """Another image would have another glibc than the wheel's tag promises."""
    wheel = tmp_path / "x.whl"
    wheel.touch()
    make_program(programs, "python", f'exec {sys.executable} "$@"')
    for policy in ("", "manylinux_2_34"):
        done = call(programs, "scripts/try_oldest", str(wheel), AUDITWHEEL_POLICY=policy)
        assert done.returncode == 1
        assert f"no image of manylinux_2_28, but of '{policy}'" in done.stderr
