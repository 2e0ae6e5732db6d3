# SPDX-License-Identifier: BSD-3-Clause
"""Rehearses the workflows: `ci` of a pull request, then `release` of a tag with its index.

Then it installs the release from that index and runs the self-test. `--only nightly` runs only the
nightly job that proposes digests of images, and the wheels that it needs. docs/release.md lists the
stand-ins, and the behaviour that only GitHub can show.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rehearsal.act import Act, JobsError
from rehearsal.checks import (
    check_dispatched,
    check_images,
    check_notes,
    check_pinned,
    check_release,
)
from rehearsal.defects import DEFECTS, Defect, check_found, put_back
from rehearsal.machine import Machine, missing_programs
from rehearsal.source import make_repository
from rehearsal.stored import storing
from release import targets
from release.loopback import serving
from release.programs import call
from release.project import ROOT, ReleaseError
from release.tag import is_pre_release
from release.trial import install, self_test

OWNER = 1001  # the user id that owns GitHub's checkouts
RUNNER = "ubuntu-24.04"  # the runner of jobs that do not depend on the platform
GPU = "a-gpu-of-the-rehearsal"
PINNING = "pin-images"  # a job of nightly
ELSEWHERE = frozenset({"cpu-wheels"})  # jobs for macOS and Windows only
PULL_REQUEST = {
    "number": 1,
    "pull_request": {"head": {"ref": "change"}, "base": {"ref": "main"}},
}


def main() -> int:
    """Rehearse; returns the exit status."""
    options = parser().parse_args()
    folder = Path(tempfile.mkdtemp(prefix="workflows-", dir=options.work))
    try:
        with serving(folder) as server, storing() as artifacts:
            rehearse(Machine(folder, server.url, OWNER, artifacts), options)
    except ReleaseError as error:
        print(f"rehearse_workflows: {error}", file=sys.stderr)
        return 1
    finally:
        if options.keep:
            print(f"== kept: {folder}")
        else:
            shutil.rmtree(folder)
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="scripts/rehearse_workflows", description=__doc__)
    made.add_argument("--act", type=Path, required=True, help="the program")
    made.add_argument(
        "--only",
        choices=["ci", "release", "nightly"],
        help="one of them; ci and release unless it is given",
    )
    made.add_argument("--job", help="of ci or nightly only this job and what it needs")
    made.add_argument(
        "--with-defect",
        choices=sorted(DEFECTS),
        metavar="NAME",
        help="put a defect back, and pass if the jobs show it: "
        + "; ".join(f"{name} ({defect.what})" for name, defect in DEFECTS.items()),
    )
    made.add_argument(
        "--without-gpu", action="store_true", help="the repository has no variable GPU_RUNNERS"
    )
    made.add_argument("--packs", type=Path, help="a folder of all CUDA packs, built before")
    made.add_argument(
        "--action",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="the action itself, with what it runs, in place of what stands in for it",
    )
    made.add_argument("--work", type=Path, help="where to make the folder that it works in")
    made.add_argument("--keep", action="store_true", help="keep that folder, with all logs")
    return made


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    print(f"== {name}", flush=True)
    started = time.monotonic()
    yield
    print(f"   {time.monotonic() - started:.0f} s", flush=True)


def rehearse(machine: Machine, options: argparse.Namespace) -> None:
    """Run the steps in order; the first failure ends the rehearsal."""
    if absent := missing_programs():
        raise ReleaseError(f"this machine lacks {', '.join(absent)}")
    with step("the runner, and what stands in for GitHub"):
        real = dict(word.split("=", 1) for word in options.action)
        folders = machine.prepare({name: Path(place) for name, place in real.items()})
        defect: Defect | None = DEFECTS.get(options.with_defect)
        change = functools.partial(put_back, defect) if defect else lambda folder: None
        tag = make_repository(machine.repository, change)
    act = Act(
        options.act,
        machine.repository,
        act_options(machine, folders, gpu=not options.without_gpu),
        machine.variables(options.packs),
    )
    if defect:
        rehearse_defect(act, tag, defect)
        return
    if options.only == "nightly":
        rehearse_nightly(machine, act, options.job or PINNING)
        return
    if options.only != "release":
        rehearse_ci(machine, act, options.job)
    if options.only != "ci":
        rehearse_release(machine, act, tag, gpu=not options.without_gpu)


def rehearse_defect(act: Act, tag: str, defect: Defect) -> None:
    """Run the jobs that show a defect, and check that they fail as expected."""
    event = {"ci": ("pull_request", PULL_REQUEST), "release": ("push", pushed(tag))}
    failure = None
    with step(f"{defect.workflow}, where {defect.what}"):
        try:
            act.run(defect.workflow, *event[defect.workflow], ELSEWHERE, defect.job)
        except JobsError as error:
            failure = error
        check_found(defect, failure)
        print(f"   found: {'/'.join(defect.fails)} failed as it had to")


def pushed(tag: str) -> dict[str, Any]:
    """Return the event payload of a pushed tag."""
    return {"ref": f"refs/tags/{tag}", "repository": {"default_branch": "main"}}


def rehearse_ci(machine: Machine, act: Act, job: str | None) -> None:
    """Run the jobs of a pull request, or one job and its dependencies."""
    with step("ci, of a pull request"):
        act.run("ci", "pull_request", PULL_REQUEST, ELSEWHERE, job)
        machine.artifacts.clear()
        check_images(machine)


def rehearse_nightly(machine: Machine, act: Act, job: str) -> None:
    """Run one job of nightly on the default branch, and its dependencies."""
    with step(f"nightly, of it {job}"):
        act.run("nightly", "workflow_dispatch", {"ref": "refs/heads/main"}, ELSEWHERE, job)
        used = check_images(machine)
        if job == PINNING:
            check_pinned(machine, used)


def rehearse_release(machine: Machine, act: Act, tag: str, *, gpu: bool) -> None:
    """Run the workflows of a pushed tag and of the index, and install from the index."""
    with step(f"release, of the tag {tag}"):
        skipped = ELSEWHERE | ({"pypi"} if is_pre_release(tag) else set())
        act.run("release", "push", pushed(tag), skipped | (set() if gpu else {"test-gpu"}))
        machine.artifacts.clear()
        used = check_images(machine)
        wheel = check_release(machine, tag, used)
        check_notes(machine, tag, gpus=gpu)
    with step("index, which the release starts on the default branch"):
        check_dispatched(machine, [["index.yml", "main"]])
        act.run("index", "workflow_dispatch", {"ref": "refs/heads/main"})
    with step("install from the index"):
        environment = machine.folder / "trial"
        call(["scripts/setup_venv"], cwd=ROOT, variables={"FDM_VENV": str(environment)})
        served = f"{machine.url}/hub/releases/{tag}/assets/{wheel.name}"
        index = f"{machine.url}/hub/pages/simple/"
        install(index, served, wheel, environment, machine.folder / "install.json")
        self_test(environment, wheel, machine.folder)


def act_options(machine: Machine, folders: dict[str, Path], *, gpu: bool) -> list[str]:
    """Return the options of every run of act. This machine runs the jobs for its own platform.

    Args:
        machine: the machine of the rehearsal.
        folders: the folder of each action, by its name with the commit.
        gpu: whether the repository names a runner with a GPU.
    """
    here = platform.machine()
    runners = {row.runner for row in targets.load().platforms if row.machine == here}
    gpus = [{"runner": GPU, "machine": here, "cuda": targets.load().cuda[-1].major}]
    options = [
        *(f"--platform={runner}=-self-hosted" for runner in sorted({GPU, RUNNER, *runners})),
        # Only a matrix's rows for this machine, and only one Python.
        *("--matrix", f"machine:{here}", "--matrix", f"python:{targets.load().pythons[0]}"),
        *(("--var", f"GPU_RUNNERS={json.dumps(gpus)}") if gpu else ()),
        *("--var", f"TORCH_INDEX={machine.url}/torch"),
        *("--no-skip-checkout", "--no-cache-server", "--concurrent-jobs", "2"),
        *("--action-cache-path", str(machine.folder / "act")),
    ]
    for use, place in folders.items():
        options += ["--local-repository", f"{use}={place}"]
    return options


if __name__ == "__main__":
    sys.exit(main())
