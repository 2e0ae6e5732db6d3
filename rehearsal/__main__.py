# SPDX-License-Identifier: BSD-3-Clause
"""A rehearsal of the workflows: `ci` of a pull request, then `release` of a tag with its index.

Then the release is installed from that index, and its self-test runs. docs/release.md tells what is
replaced, and what only GitHub can show.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rehearsal.act import Act
from rehearsal.checks import check_dispatched, check_images, check_release
from rehearsal.machine import Machine, missing_programs
from rehearsal.source import make_repository
from rehearsal.stored import storing
from release import targets
from release.loopback import serving
from release.programs import call
from release.project import ROOT, ReleaseError
from release.tag import is_pre_release
from release.trial import install, self_test

OWNER = 1001  # of GitHub's checkouts
RUNNER = "ubuntu-24.04"  # of jobs for every platform
GPU = "a-gpu-of-the-rehearsal"
ELSEWHERE = frozenset({"cpu-wheels"})  # jobs of macOS and Windows alone


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
        "--only", choices=["ci", "release"], help="one of the two; both unless it is given"
    )
    made.add_argument("--job", help="of ci only this job and what it needs")
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
    """Run every step; the first that fails ends it."""
    if absent := missing_programs():
        raise ReleaseError(f"this machine lacks {', '.join(absent)}")
    with step("the runner, and what stands in for GitHub"):
        real = dict(word.split("=", 1) for word in options.action)
        folders = machine.prepare({name: Path(place) for name, place in real.items()})
        tag = make_repository(machine.repository)
    act = Act(
        options.act,
        machine.repository,
        act_options(machine, folders),
        machine.variables(options.packs),
    )
    if options.only != "release":
        rehearse_ci(machine, act, options.job)
    if options.only != "ci":
        rehearse_release(machine, act, tag)


def rehearse_ci(machine: Machine, act: Act, job: str | None) -> None:
    """Run the checks of a pull request, or one of them and what it needs."""
    pull = {"head": {"ref": "change"}, "base": {"ref": "main"}}
    with step("ci, of a pull request"):
        act.run("ci", "pull_request", {"number": 1, "pull_request": pull}, ELSEWHERE, job)
        machine.artifacts.clear()
        check_images(machine)


def rehearse_release(machine: Machine, act: Act, tag: str) -> None:
    """Push the tag, make the index, and install from there."""
    pushed = {"ref": f"refs/tags/{tag}", "repository": {"default_branch": "main"}}
    with step(f"release, of the tag {tag}"):
        skipped = ELSEWHERE | ({"pypi"} if is_pre_release(tag) else set())
        act.run("release", "push", pushed, skipped)
        machine.artifacts.clear()
        used = check_images(machine)
        wheel = check_release(machine, tag, used)
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


def act_options(machine: Machine, folders: dict[str, Path]) -> list[str]:
    """Return the options of every run of act: this machine is the runner of its own kind."""
    here = platform.machine()
    runners = {row.runner for row in targets.load().platforms if row.machine == here}
    gpus = [{"runner": GPU, "machine": here, "cuda": targets.load().cuda[-1].major}]
    options = [
        *(f"--platform={runner}=-self-hosted" for runner in sorted({GPU, RUNNER, *runners})),
        # Only this machine's rows of a matrix, and of equal jobs for each Python one.
        *("--matrix", f"machine:{here}", "--matrix", f"python:{targets.load().pythons[0]}"),
        *("--var", f"GPU_RUNNERS={json.dumps(gpus)}"),
        *("--var", f"TORCH_INDEX={machine.url}/torch"),
        *("--no-skip-checkout", "--no-cache-server", "--concurrent-jobs", "2"),
        *("--action-cache-path", str(machine.folder / "act")),
    ]
    for use, place in folders.items():
        options += ["--local-repository", f"{use}={place}"]
    return options


if __name__ == "__main__":
    sys.exit(main())
