# SPDX-License-Identifier: BSD-3-Clause
"""The folder that stands in for GitHub's runner in the jobs of a rehearsal.

actions/     stand-ins for the actions; artifacts/ has the scripts of two of them
bin/         docker, gh and python3, first on the PATH
home/        the home of the jobs' user
hub/         the data of GitHub and of the registry: releases, pages, images
repository/  the rehearsed repository
tools/       what containers installed into /tmp/tools
torch/cpu/   an index of torch for the CPU
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from rehearsal.stored import Server
from release.distributions import project_and_version
from release.programs import call
from release.project import ROOT, ReleaseError

HERE = ROOT / "rehearsal"
USES = re.compile(r"uses: ([\w-]+/([\w-]+)@[0-9a-f]{40})")
PROGRAMS = {
    "git": "git",
    "npm": "npm",
    "node": "nodejs",
    "c++": "g++",
    "unshare": "util-linux",
    "chroot": "coreutils",
}


@dataclass(frozen=True)
class Machine:
    """The folder, the address that serves it, the owner of checkouts, and the artifacts."""

    folder: Path
    url: str
    owner: int
    artifacts: Server

    @property
    def hub(self) -> Path:
        return self.folder / "hub"

    @property
    def repository(self) -> Path:
        return self.folder / "repository"

    def variables(self, packs: Path | None) -> dict[str, str]:
        """Return the environment of the jobs."""
        caches = {
            "PIP_CACHE_DIR": Path.home() / ".cache" / "pip",
            "npm_config_cache": Path.home() / ".npm",
        }
        return {
            **{name: os.environ.get(name, str(folder)) for name, folder in caches.items()},
            "HOME": str(self.folder / "home"),
            "PATH": os.pathsep.join([str(self.folder / "bin"), os.environ["PATH"]]),
            "PYTHONPATH": str(HERE / "site"),
            "PYTEST_ADDOPTS": "-p rehearsal_sample",
            # Each worker imports and collects all tests, which takes longer than the sample.
            "PYTEST_XDIST_AUTO_NUM_WORKERS": "1",
            "PIP_FIND_LINKS": " ".join(
                filter(None, [os.environ.get("PIP_FIND_LINKS"), str(self.folder / "wheels")])
            ),
            "PIP_CONSTRAINT": str(self.folder / "constraint.txt"),
            # cibuildwheel builds nothing: it needs a real container engine and a real compiler.
            "CIBW_SKIP": "*",
            "CIBW_ALLOW_EMPTY": "1",
            **self.artifacts.variables(),
            "REHEARSAL": str(self.folder),
            "REHEARSAL_URL": self.url,
            "REHEARSAL_OWNER": str(self.owner),
            "REHEARSAL_PACKS": str(packs.resolve()) if packs else "",
        }

    def prepare(self, real: dict[str, Path]) -> dict[str, Path]:
        """Fill the folder, and return the folder of each action by its name in the workflows."""
        for name in ("bin", "home", "hub/releases"):
            (self.folder / name).mkdir(parents=True)
        self.add_program(
            "docker", f'PYTHONPATH="{ROOT}" exec "{sys.executable}" -m rehearsal.docker'
        )
        self.add_program("gh", f'PYTHONPATH="{ROOT}" exec "{sys.executable}" -m rehearsal.gh')
        for name in ("python", "python3"):
            self.add_program(name, f'exec "{sys.executable}"')
        self.add_torch()
        self.add_artifacts()
        shutil.copytree(HERE / "actions", self.folder / "actions")
        return actions(self.folder / "actions", real)

    def add_program(self, name: str, command: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f'#!/bin/sh\n{command} "$@"\n')
        path.chmod(0o755)

    def add_torch(self) -> None:
        """Download torch and its dependencies, as a package index and as one folder."""
        wheels = self.folder / "wheels"
        torch = os.environ.get("FDM_TORCH", "torch==2.13.0").split()
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        call([*pip, "--only-binary=:all:", "--dest", wheels, *torch])
        for path in wheels.iterdir():
            project, version = project_and_version(path.name)
            place = self.folder / "torch" / "cpu" / project
            place.mkdir(parents=True, exist_ok=True)
            (place / path.name).hardlink_to(path)
            if project == "torch":
                (self.folder / "constraint.txt").write_text(f"torch=={version}\n")

    def add_artifacts(self) -> None:
        """Install GitHub's library for artifacts, at the versions and hashes of the lock file."""
        place = self.folder / "artifacts"
        shutil.copytree(HERE / "artifacts", place)
        try:
            call(["npm", "ci", "--omit=dev", "--no-audit", "--no-fund", "--silent"], cwd=place)
        except ReleaseError as error:
            raise ReleaseError(
                f"{error}: the packages of rehearsal/artifacts/package-lock.json are needed, from "
                "the registry that npm is configured for, or from npm's cache"
            ) from error


def missing_programs() -> list[str]:
    """Return the missing programs, with the Debian packages that contain them."""
    return [
        f"{name} (package {package})"
        for name, package in PROGRAMS.items()
        if not shutil.which(name)
    ]


def actions(folder: Path, real: dict[str, Path]) -> dict[str, Path]:
    """Return a folder for each action that a workflow uses, by its name with the commit.

    Raises:
        ReleaseError: an action has no stand-in.
    """
    found = {}
    for workflow in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        for use, name in USES.findall(workflow.read_text()):
            found[use] = real.get(name, folder / name)
    absent = [use for use, place in found.items() if not (place / "action.yml").is_file()]
    if absent:
        raise ReleaseError(f"rehearsal/actions has nothing that stands in for {', '.join(absent)}")
    return found
