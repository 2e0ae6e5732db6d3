# SPDX-License-Identifier: BSD-3-Clause
"""Rehearses a release on this machine; scripts/rehearse_release starts it."""

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
from dataclasses import dataclass, field
from pathlib import Path

from release import targets
from release.loopback import Server, local_release, serving
from release.matrix import jobs
from release.programs import call, cuda_version, find_nvcc
from release.project import ROOT, ReleaseError, pyproject_value
from release.tag import check_tag
from release.trial import install, self_test


@dataclass
class Rehearsal:
    """The working folder, the packs to build, and the time of each step."""

    work: Path
    cuda: str | None
    archs: str
    head_dims: str
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def dist(self) -> Path:
        return self.work / "served" / "files"

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        print(f"== {name}", flush=True)
        start = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - start, 1)
        print(f"   {self.seconds[name]} s", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cuda",
        default="auto",
        help="CUDA major of the packs; auto: nvcc's, if any; none: cpu only",
    )
    parser.add_argument("--archs", default="90", help="of the packs; empty: all of the table")
    parser.add_argument("--head-dims", default="64", help="of the packs; empty: all")
    parser.add_argument("--output", type=Path, help="keep the assets, the index and rehearsal.json")


def run(options: argparse.Namespace) -> None:
    """Rehearse, and keep the results, also after a failure."""
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        cuda = chosen_cuda(options.cuda)
        rehearsal = Rehearsal(Path(folder), cuda, options.archs, options.head_dims)
        try:
            rehearse(rehearsal)
        finally:
            if options.output:
                keep(rehearsal, options.output)
    print(f"== rehearsed in {sum(rehearsal.seconds.values()):.0f} s: {rehearsal.seconds}")


def chosen_cuda(wanted: str) -> str | None:
    """Return the CUDA major to build for; None builds the cpu pack only."""
    if wanted == "none":
        return None
    if wanted != "auto":
        return wanted
    try:
        return cuda_version(find_nvcc(None)).partition(".")[0]
    except ReleaseError as error:
        print(f"== the cpu pack only: {error}")
        return None


def rehearse(rehearsal: Rehearsal) -> None:
    """Run the steps in order; the first failure ends the rehearsal."""
    tag = f"v{pyproject_value('version')}"
    with rehearsal.step("tag"):
        check_tag(tag, dated=False)
    with rehearsal.step("matrix"):
        matrix = jobs(targets.load(), [platform.machine()])
        rows = [row for row in matrix["packs"] if row["cuda"] == rehearsal.cuda]
        print(
            f"   {len(matrix['packs'])} pack jobs, {len(matrix['wheels'])} wheels; "
            f"here {rows or 'cpu'}"
        )
    with rehearsal.step("sdist"):
        python("-m", "build", "--sdist", "--no-isolation", "--outdir", rehearsal.dist, ROOT)
    folders: list[Path] = []
    for row in rows:
        with rehearsal.step(f"packs of CUDA {row['cuda']}"):
            folders.append(rehearsal.work / row["artifact"])
            archs, head_dims = rehearsal.archs or row["archs"], rehearsal.head_dims
            what = ["--cuda", row["cuda"], "--archs", archs, "--head-dims", head_dims]
            release("packs", *what, "--output", folders[-1])
    with rehearsal.step("wheel"):
        release("wheel", "--no-isolation", "--output", rehearsal.dist, "--packs", *folders)
        (wheel,) = rehearsal.dist.glob("*.whl")
    with rehearsal.step("gates"):
        release("gates", wheel, "--report", rehearsal.work / "gates.json")
    with rehearsal.step("assets"):
        release("assets", rehearsal.dist, "--notes", rehearsal.work / "notes.md")
    with serving(rehearsal.work / "served") as server:
        with rehearsal.step("index"):
            make_index(rehearsal, server, tag)
        environment = rehearsal.work / "venv"
        with rehearsal.step("environment with torch"):
            call(["scripts/setup_venv"], cwd=ROOT, variables={"FDM_VENV": str(environment)})
        with rehearsal.step("install from the index"):
            served = f"{server.url}/files/{wheel.name}"
            index = f"{server.url}/index/simple/"
            install(index, served, wheel, environment, rehearsal.work / "install.json")
            if f"/files/{wheel.name}.metadata" not in server.requests:
                raise ReleaseError("pip did not find the metadata file beside the wheel")
    with rehearsal.step("self-test"):
        self_test(environment, wheel, rehearsal.work)


def make_index(rehearsal: Rehearsal, server: Server, tag: str) -> None:
    releases = rehearsal.work / "releases.json"
    releases.write_text(json.dumps([local_release(rehearsal.dist, tag, f"{server.url}/files")]))
    site = rehearsal.work / "served" / "index"
    release("index", "--releases", releases, "--output", site)


def release(verb: str, *arguments: str | Path) -> None:
    python("-m", "release", verb, *arguments)


def python(*arguments: str | Path) -> None:
    call([sys.executable, *arguments], cwd=ROOT)


def keep(rehearsal: Rehearsal, output: Path) -> None:
    """Copy the results that exist."""
    if rehearsal.dist.exists():
        shutil.copytree(rehearsal.work / "served", output, dirs_exist_ok=True)
    output.mkdir(parents=True, exist_ok=True)
    for path in rehearsal.work.glob("*.*"):
        if path.is_file():
            shutil.copy(path, output)
    record = {"cuda": rehearsal.cuda, "archs": rehearsal.archs, "seconds": rehearsal.seconds}
    (output / "rehearsal.json").write_text(json.dumps(record, indent=1) + "\n")
