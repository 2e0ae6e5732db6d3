# SPDX-License-Identifier: BSD-3-Clause
"""The stand-ins for GitHub in rehearsed workflows; .ci/run rehearses them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from release_files import CPU, CU13, make_sdist, make_wheel

from rehearsal.act import Act, JobsError, expected
from rehearsal.checks import check_pinned
from rehearsal.machine import USES, Machine, actions
from rehearsal.source import IDENTITY, date_changelog, lower_floor
from rehearsal.stored import SERVICE, Server, storing
from release import matrix, targets
from release.project import ROOT, ReleaseError, pyproject_value

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
DIGEST = "sha256:" + "0" * 64


# --- actions


def test_something_stands_in_for_every_action() -> None:
    used = {use for path in WORKFLOWS for use, _ in USES.findall(path.read_text())}
    assert set(actions(ROOT / "rehearsal" / "actions", {})) == used


def test_an_action_can_be_itself(tmp_path: Path) -> None:
    (tmp_path / "action.yml").touch()
    found = actions(ROOT / "rehearsal" / "actions", {"checkout": tmp_path})
    (use,) = [use for use, place in found.items() if place == tmp_path]
    assert use.startswith("actions/checkout@")


def test_an_action_without_a_stand_in_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="stands in for actions/checkout@"):
        actions(tmp_path, {})


def test_a_stand_in_takes_every_input_that_a_workflow_gives() -> None:
    step = re.compile(
        r"uses: [\w-]+/([\w-]+)@.*\n(?: +env:\n(?: {10,}.*\n)*)?( +)with:\n((?:\2  .*\n)+)"
    )
    given = 0
    for path in WORKFLOWS:
        for name, indent, lines in step.findall(path.read_text()):
            text = (ROOT / "rehearsal" / "actions" / name / "action.yml").read_text()
            inputs = set(re.findall(r"^  ([\w-]+):$", text.partition("runs:")[0], re.MULTILINE))
            names = set(re.findall(rf"^{indent}  ([\w-]+):", lines, re.MULTILINE))
            assert names <= inputs, (path.name, name)
            given += len(names)
    assert given > 40


def test_jobs_can_check_out_at_once(tmp_path: Path) -> None:
    """Jobs share a home folder, and git does not wait for another git's configuration lock."""
    text = (ROOT / "rehearsal" / "actions" / "checkout" / "action.yml").read_text()
    (command,) = re.findall(r"^ +(.*git config --global .*)$", text, re.MULTILINE)
    # Each directory is new, so every run writes the configuration and needs the lock.
    script = f"for n in {{1..20}}; do PWD=/$1/$n; {command} || exit; done"
    jobs = [
        subprocess.Popen(
            ["bash", "-c", script, "checkout", str(number)],
            env={**os.environ, "HOME": str(tmp_path)},
            stderr=subprocess.DEVNULL,
        )
        for number in range(4)
    ]
    assert [job.wait() for job in jobs] == [0] * 4
    assert (tmp_path / ".gitconfig").read_text().count("directory = ") == 80


# --- the source


def test_a_release_has_its_date(tmp_path: Path) -> None:
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text("# Changelog\n\n## 2.0.0 (unreleased)\n\nNews.\n")
    date_changelog(changelog, "2.0.0")
    assert "## 2.0.0 (2030-01-31)\n\nNews." in changelog.read_text()


def test_this_machine_can_keep_what_the_wheel_promises(tmp_path: Path) -> None:
    table = tmp_path / "targets.json"
    table.write_text(targets.TABLE.read_text())
    lower_floor(table)
    before, after = targets.load(), targets.load(table)
    assert re.fullmatch(r"manylinux_\d+_\d+", after.wheel.policy)
    assert after.wheel.policy == f"manylinux_{after.wheel.glibc.replace('.', '_')}"
    assert targets.version_numbers(after.wheel.glibcxx) >= (3, 4, 24)
    # The images are those with committed digests.
    assert after.wheel.image.format(machine="x86_64") == before.wheel.image.format(
        policy=before.wheel.policy, machine="x86_64"
    )
    assert after.archs == before.archs


# --- jobs


def test_every_job_is_expected() -> None:
    assert set(expected(ROOT, "release")) >= {
        ("release", "tag"),
        ("wheels", "packs"),
        ("wheels", "wheels"),
        ("test-cpu", "test"),
        ("test-gpu", "test"),
        ("release", "draft"),
        ("release", "publish"),
        ("release", "index"),
    }
    assert ("release", "wheels") not in set(expected(ROOT, "release"))


def small_repository(folder: Path) -> Path:
    place = folder / "repository" / ".github" / "workflows"
    place.mkdir(parents=True)
    (place / "top.yml").write_text(
        "name: top\non: push\njobs:\n  first:\n    runs-on: x\n\n"
        "  called:\n    needs: first\n    uses: ./.github/workflows/inner.yml\n"
    )
    (place / "inner.yml").write_text("on: workflow_call\njobs:\n  inside:\n    runs-on: x\n")
    return folder / "repository"


def result(job: str, identity: str, outcome: str) -> dict[str, str]:
    return {"job": job, "jobID": identity, "msg": "done", "jobResult": outcome}


FIRST = result("top/first", "first", "success")
INSIDE = result("called/inner/inside-1", "inside", "success")


def run_with(
    folder: Path, *lines: Mapping[str, str], status: int = 0, job: str | None = None
) -> None:
    folder.mkdir(exist_ok=True)
    act = folder / "act"
    printed = "\n".join(json.dumps(line) for line in lines)
    act.write_text(f"#!/bin/sh\ncat <<'END'\nno json\n{printed}\nEND\nexit {status}\n")
    act.chmod(0o755)
    Act(act, small_repository(folder), [], {}).run("top", "push", {}, job=job)


def test_a_run_whose_jobs_all_passed_is_one(tmp_path: Path) -> None:
    run_with(tmp_path, FIRST, INSIDE)
    assert "[] no json" in (tmp_path / "logs" / "top.log").read_text()


def test_one_job_can_be_asked_for(tmp_path: Path) -> None:
    run_with(tmp_path / "a", FIRST, job="first")
    run_with(tmp_path / "b", FIRST, INSIDE, job="called")
    with pytest.raises(ReleaseError, match="did not run: called/inside"):
        run_with(tmp_path / "c", FIRST, job="called")


@pytest.mark.parametrize(
    ("lines", "status", "message"),
    [
        ([FIRST], 0, "did not run: called/inside"),
        ([FIRST, INSIDE], 1, "act ended with 1"),
        (
            [FIRST, result("called/inner/inside-1", "inside", "failure"), INSIDE],
            0,
            "failed: called",
        ),
        ([result("top/first", "first", "skipped"), INSIDE], 0, "failed: top/first"),
    ],
)
def test_anything_else_is_a_failure(
    lines: list[dict[str, str]], status: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ReleaseError, match=message):
        run_with(tmp_path, *lines, status=status)


def test_a_failed_run_tells_which_jobs_failed_and_what_they_printed(tmp_path: Path) -> None:
    said = {"job": "called/inner/inside-1", "msg": "no disk"}
    with pytest.raises(JobsError) as failed:
        run_with(tmp_path, FIRST, said, result("called/inner/inside-1", "inside", "failure"))
    assert failed.value.jobs == {("called", "inside")}
    assert failed.value.lines == ["no disk", "done"]


# --- artifacts


def ask(url: str, method: str, **request: Any) -> dict[str, Any]:
    content = json.dumps(request).encode()
    with urllib.request.urlopen(f"{url}{SERVICE[1:]}{method}", content, timeout=5) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def put(url: str, content: bytes) -> None:
    request = urllib.request.Request(url, content, method="PUT")
    urllib.request.urlopen(request, timeout=5).close()


def test_an_artifact_comes_back_as_it_was_stored() -> None:
    with storing() as server:
        place = ask(server.url, "CreateArtifact", name="a")["signed_upload_url"]
        put(f"{place}&comp=block&blockid=2", b"world")
        put(f"{place}&comp=block&blockid=1", b"hello ")
        put(f"{place}&comp=blocklist", b"<List><Latest>1</Latest><Latest>2</Latest></List>")
        ask(server.url, "FinalizeArtifact", name="a", hash="sha256:1")
        (listed,) = ask(server.url, "ListArtifacts")["artifacts"]
        assert (listed["name"], listed["size"], listed["digest"]) == ("a", "11", "sha256:1")
        assert ask(server.url, "ListArtifacts", name_filter="b") == {"artifacts": []}
        signed = ask(server.url, "GetSignedArtifactURL", name="a")["signed_url"]
        with urllib.request.urlopen(signed, timeout=5) as answer:
            assert answer.read() == b"hello world"


def test_two_jobs_cannot_leave_the_same_artifact() -> None:
    with storing() as server:
        ask(server.url, "CreateArtifact", name="a")
        with pytest.raises(urllib.error.HTTPError, match="409"):
            ask(server.url, "CreateArtifact", name="a")
        server.clear()
        assert ask(server.url, "CreateArtifact", name="a")["ok"]


# --- programs


def stand_in(
    program: str, work: Path, *words: str | Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    (work / "hub" / "releases").mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "REHEARSAL": str(work), "REHEARSAL_URL": "http://127.0.0.1:1"}
    return subprocess.run(
        [sys.executable, "-m", f"rehearsal.{program}", *map(str, words)],
        cwd=ROOT,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_tag_of_an_image_moves(tmp_path: Path) -> None:
    inspect = ["buildx", "imagetools", "inspect", "--format", "x", "quay.io/a"]
    digests = [stand_in("docker", tmp_path, *inspect).stdout for _ in range(2)]
    assert digests[0] != digests[1]
    assert all(re.fullmatch(r"sha256:[0-9a-f]{64}\n", digest) for digest in digests)


@pytest.mark.parametrize("image", ["quay.io/a", f"quay.io/a@{DIGEST}"])
def test_an_image_that_nobody_looked_up_is_not_there(image: str, tmp_path: Path) -> None:
    done = stand_in("docker", tmp_path, "run", "--rm", image, "true")
    assert done.returncode != 0
    assert f"no digest of {image} is committed, or was looked up" in done.stderr


def mounts_are_refused() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("unshare"):
        return True
    mount = ["unshare", "--mount", "--propagation", "private"]
    mount += ["mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(mount, capture_output=True, check=False).returncode != 0


@pytest.mark.skipif(mounts_are_refused(), reason="mounts need root that may mount, on Linux")
def test_a_container_sees_its_volume_alone(tmp_path: Path) -> None:
    inspect = ["buildx", "imagetools", "inspect", "quay.io/a"]
    image = f"quay.io/a@{stand_in('docker', tmp_path, *inspect).stdout.strip()}"
    (tmp_path / "volume" / "cmake").mkdir(parents=True)
    shutil.copy(targets.TABLE, tmp_path / "volume" / "cmake")
    (tmp_path / "volume" / "in").write_text("hello")
    script = (
        'set -e; cat in; echo "$HOME $EPOCH $UNNAMED $AUDITWHEEL_POLICY"; ls -A ..; '
        'test ! -e "$HOME/.gitconfig"; '
        "/opt/python/cp310-cp310/bin/python -c 'print(3)'; echo made >out; exit 7"
    )
    options = ["--rm", "--volume", f"{tmp_path}/volume:{tmp_path}/volume"]
    options += ["--workdir", f"{tmp_path}/volume", "--env", "EPOCH", image]
    done = stand_in(
        "docker", tmp_path, "run", *options, "bash", "-c", script, EPOCH="5", UNNAMED="secret"
    )
    assert done.returncode == 7, done.stderr
    policy = targets.load().wheel.policy
    assert done.stdout == f"hello/root 5  {policy}\nvolume\n3\n"
    assert (tmp_path / "volume" / "out").read_text() == "made\n"
    assert json.loads((tmp_path / "hub" / "images.jsonl").read_text())["image"] == image


def test_a_draft_becomes_a_release_of_the_index(tmp_path: Path) -> None:
    version = pyproject_value("version")
    files = [make_wheel(tmp_path / "dist", version, packs=(CPU, CU13))]
    files += [make_sdist(tmp_path / "dist", version)]
    (tmp_path / "notes.md").touch()
    tag = f"v{version}"
    view = ["release", "view", tag, "--json", "isDraft", "--jq", ".isDraft"]
    assert stand_in("gh", tmp_path, *view).returncode == 1
    options = ["--draft", "--verify-tag", "--title", "t", "--notes-file", tmp_path / "notes.md"]
    create = ["release", "create", tag, *options, "--prerelease=true", *files]
    assert stand_in("gh", tmp_path, *create).returncode == 0
    assert stand_in("gh", tmp_path, *view).stdout == "true\n"
    assert stand_in("gh", tmp_path, "release", "edit", tag, "--draft=false").returncode == 0
    api = ["api", "--paginate", "--slurp", "repos/a/b/releases?per_page=100"]
    ((listed,),) = json.loads(stand_in("gh", tmp_path, *api).stdout)
    assert not listed["draft"]
    assert [asset["name"] for asset in listed["assets"]] == sorted(path.name for path in files)


def test_digests_are_proposed_once_and_renewed(tmp_path: Path) -> None:
    """`release pin` runs as in the nightly job, with the stand-in for gh."""
    repository, lock = tmp_path / "repository", matrix.LOCK.relative_to(ROOT)
    (repository / lock).parent.mkdir(parents=True)
    (repository / lock).write_text("{}")
    git = ["git", "-C", repository]
    for words in (
        ["init", "--quiet", "--initial-branch", "main"],
        ["add", "."],
        [*IDENTITY, "commit", "--quiet", "--message", "Begin"],
    ):
        subprocess.run([*git, *words], check=True)
    gh = tmp_path / "bin" / "gh"
    gh.parent.mkdir()
    gh.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m rehearsal.gh "$@"\n')
    gh.chmod(0o755)
    variables = {
        "PATH": f"{gh.parent}{os.pathsep}{os.environ['PATH']}",
        "REHEARSAL": str(tmp_path),
        "REHEARSAL_URL": "",
        "GITHUB_REPOSITORY": "a/b",
    }
    (tmp_path / "hub").mkdir()
    for number in range(2):
        image = f"quay.io/a@sha256:{number:064}"
        build = json.dumps({"packs": [{"image": image}], "wheels": []})
        command = [sys.executable, "-m", "release", "pin", "--build", build]
        subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, check=True)
        machine = Machine(tmp_path, "", 0, cast("Server", None))
        check_pinned(machine, dict([image.split("@")]))
        with pytest.raises(ReleaseError, match="has other digests"):
            check_pinned(machine, {"quay.io/a": DIGEST.replace("0", "f")})


def test_packs_are_as_the_options_ask(tmp_path: Path) -> None:
    options = {
        "FLASH_DMATTN_ARCHS": "sm90;80",
        "FLASH_DMATTN_HEAD_DIMS": "64;128",
        "FLASH_DMATTN_COMMIT": "c" * 40,
    }
    flags = [f"-D{name}={value}" for name, value in options.items()]
    build = tmp_path / "build"
    for words in (
        ["-S", ROOT, "-B", build, "-G", "Ninja", *flags],
        ["--build", build],
        ["--install", build, "--strip", "--prefix", tmp_path / "out"],
    ):
        done = stand_in("cmake", tmp_path, *words, REHEARSAL_CUDA="13.1", REHEARSAL_PACKS="")
        assert done.returncode == 0, done.stderr
    packs = tmp_path / "out" / "flash_dmattn" / "packs"
    rows = json.loads((packs / "manifest.json").read_text())["packs"]
    assert [row["name"] for row in rows] == ["cu13-sm80", "cu13-sm90"]
    assert {row["commit"] for row in rows} == {"c" * 40}
    assert {tuple(row["head_dims"]) for row in rows} == {(64, 128)}
    assert {path.name for path in packs.glob("*.so")} == {row["file"] for row in rows}


@pytest.mark.parametrize("packs, passed", [("", 2), ("packs", 3)])
def test_a_sample_opens_no_stand_ins_of_packs(packs: str, passed: int, tmp_path: Path) -> None:
    """Every hundredth of 300 tests runs; the first hundred open CUDA packs."""
    (tmp_path / "test_packs.py").write_text(
        "from types import SimpleNamespace\n"
        "import pytest\n"
        "devices = ['cuda'] * 100 + ['cpu'] * 200\n"
        "@pytest.mark.parametrize('candidate', [SimpleNamespace(device=d) for d in devices])\n"
        "def test_pack(candidate): pass\n"
    )
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "rehearsal_sample",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [*words, "test_packs.py"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "rehearsal" / "site"),
            "REHEARSAL_PACKS": packs,
        },
        capture_output=True,
        text=True,
    )
    assert f"{passed} passed" in done.stdout, done.stdout + done.stderr
