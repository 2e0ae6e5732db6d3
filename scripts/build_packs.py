#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Builds the kernel packs of one CUDA major for this machine's platform into a folder.

The folder gets the libraries and the manifest.json that describes them. It is an input of
scripts/assemble_wheel.py and of the CMake option FLASH_DMATTN_PREBUILT_PACKS, and the loader can
read it through an entry point. Needs cmake, ninja, nvcc and a C++ compiler; no Python packages.

    scripts/build_packs.py --cuda 13 --archs "90" --head-dims "64 128" --output packs/cu13
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from wheels import targets
from wheels.builds import BuildError, build_packs, find_nvcc, nvcc_version


def main() -> int:
    """Parse the command line, build, and print the folder."""
    table = targets.load()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    majors = [row.major for row in table.cuda]
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
    asked = parser.parse_args()
    try:
        nvcc = find_nvcc(asked.nvcc)
        version = nvcc_version(nvcc)
        if version.partition(".")[0] != asked.cuda:
            raise BuildError(f"{nvcc} is of CUDA {version}, not {asked.cuda}; name one with --nvcc")
        oldest = table.cuda_of(asked.cuda).min_toolkit
        if targets.version_numbers(version) < targets.version_numbers(oldest):
            raise BuildError(
                f"{nvcc} is of CUDA {version}; {oldest} is the oldest that is supported"
            )
        options = {
            "FLASH_DMATTN_ARCHS": ";".join(asked.archs.replace(",", " ").split()),
            "FLASH_DMATTN_HEAD_DIMS": ";".join(asked.head_dims.replace(",", " ").split()),
            "FLASH_DMATTN_CUDART": asked.cudart,
        }
        print(build_packs(nvcc, asked.output, asked.build_dir, options, asked.jobs))
    except BuildError as error:
        print(f"build_packs: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
