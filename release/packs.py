# SPDX-License-Identifier: BSD-3-Clause
"""Builds the kernel packs of one CUDA major for this machine's platform.

The output folder has the libraries and their manifest.json. It is an input of ``python -m release
wheel`` and of the CMake option FLASH_DMATTN_PREBUILT_PACKS, and the loader can read it through an
entry point. Needs cmake (or the program in the variable CMAKE), ninja, nvcc and a C++ compiler; no
Python packages.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from release import targets
from release.programs import call, cuda_version, find_nvcc
from release.project import ROOT, ReleaseError, commit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    majors = [row.major for row in targets.load().cuda]
    parser.add_argument("--cuda", required=True, choices=majors, help="the CUDA major")
    parser.add_argument("--output", required=True, type=Path, help="folder; replaced")
    parser.add_argument(
        "--archs", default="all", help="such as '80 90', 'required', or 'all' that nvcc compiles"
    )
    parser.add_argument("--head-dims", default="", help="such as '64 128'; all by default")
    parser.add_argument("--cudart", default="static", choices=["static", "shared"])
    parser.add_argument("--nvcc", help="the compiler; by default the one that CMake would find")
    parser.add_argument("--build-dir", type=Path, help="keep the build here")
    parser.add_argument("--jobs", type=int, help="compilers at once; by default what memory allows")


def run(options: argparse.Namespace) -> None:
    """Build, and print the folder."""
    nvcc = find_nvcc(options.nvcc)
    version = cuda_version(nvcc)
    if version.partition(".")[0] != options.cuda:
        raise ReleaseError(f"{nvcc} is of CUDA {version}, not {options.cuda}; name one with --nvcc")
    oldest = targets.load().cuda_of(options.cuda).min_toolkit
    if targets.version_numbers(version) < targets.version_numbers(oldest):
        raise ReleaseError(f"{nvcc} is of CUDA {version}; {oldest} is the oldest that is supported")
    definitions = {
        "FLASH_DMATTN_CORE": "OFF",
        "FLASH_DMATTN_CPU": "OFF",
        "FLASH_DMATTN_CUDA": "ON",
        "FLASH_DMATTN_ARCHS": ";".join(options.archs.replace(",", " ").split()),
        "FLASH_DMATTN_HEAD_DIMS": ";".join(options.head_dims.replace(",", " ").split()),
        "FLASH_DMATTN_CUDART": options.cudart,
        "FLASH_DMATTN_COMMIT": commit(),
        "FLASH_DMATTN_PREBUILT_PACKS": "",
        "CMAKE_CUDA_COMPILER": str(nvcc),
    }
    flags = [f"-D{name}={value}" for name, value in definitions.items()]
    jobs = {} if options.jobs is None else {"MAX_JOBS": str(options.jobs)}
    with tempfile.TemporaryDirectory() as scratch:
        build = options.build_dir or Path(scratch) / "build"
        stage = Path(scratch) / "stage"
        cmake = os.environ.get("CMAKE", "cmake")
        call([cmake, "-S", ROOT, "-B", build, "-G", "Ninja", *flags], variables=jobs)
        call([cmake, "--build", build], variables=jobs)
        call([cmake, "--install", build, "--strip", "--prefix", stage])
        # Replaced as a whole, since its manifest must describe all of its files.
        if options.output.exists():
            shutil.rmtree(options.output)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(stage / "flash_dmattn" / "packs", options.output)
    packs = json.loads((options.output / "manifest.json").read_text())["packs"]
    for pack in packs:
        print(f"{pack['name']}: {pack['size'] / 10**6:.2f} MB", file=sys.stderr)
    if problems := [text for text in map(targets.load().oversize, packs) if text]:
        raise ReleaseError("; ".join(problems) + " (packs of cmake/targets.json)")
    print(options.output)
