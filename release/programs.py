# SPDX-License-Identifier: BSD-3-Clause
"""Runs other programs, and finds those of CUDA."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from release.project import ReleaseError
from release.targets import version_numbers


def call(
    command: Sequence[str | Path],
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Print a command to stderr and run it with additional environment variables.

    The search path starts with the programs of this Python's environment, activated or not.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, **(variables or {})}
    words = [str(word) for word in command]
    print("+", *words, file=sys.stderr, flush=True)
    try:
        # This process's stdout is for the results of its own verb.
        subprocess.run(words, check=True, cwd=cwd, env=environment, stdout=sys.stderr)
    except FileNotFoundError as error:
        raise ReleaseError(f"there is no program {words[0]}") from error
    except subprocess.CalledProcessError as error:
        raise ReleaseError(f"{words[0]} failed with status {error.returncode}") from error


def output(command: Sequence[str | Path]) -> str:
    """Return a command's stdout; its stderr passes through."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    except FileNotFoundError as error:
        raise ReleaseError(f"there is no program {words[0]}") from error
    except subprocess.CalledProcessError as error:
        raise ReleaseError(f"{' '.join(words)} failed with status {error.returncode}") from error
    return done.stdout


def _places(program: str) -> list[str | None]:
    """Return the places to search for a program of CUDA: the PATH and toolkits."""
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return [program, *(f"{folder}/bin/{program}" for folder in toolkits if folder)]


def _first(places: Iterable[str | None]) -> Path | None:
    found = (shutil.which(place) for place in places if place)
    return next((Path(path) for path in found if path), None)


def find_nvcc(named: str | None) -> Path:
    """Return the named nvcc, or the one that CMake would find."""
    found = _first([named] if named else [os.environ.get("CUDACXX"), *_places("nvcc")])
    if found is None:
        looked = "CUDACXX, PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda"
        raise ReleaseError(
            f"there is no nvcc {named}" if named else f"no nvcc was found (looked at {looked})"
        )
    return found


def find_cuobjdump() -> Path | None:
    """Return the newest cuobjdump on the PATH, in a toolkit or in the extra [gates]."""
    package = importlib.util.find_spec("nvidia")
    folders = list(package.submodule_search_locations or []) if package else []
    places = [*_places("cuobjdump"), *(f"{folder}/cu13/bin/cuobjdump" for folder in folders)]
    found = {shutil.which(place) for place in places if place} - {None}
    versions = {Path(place): version_numbers(cuda_version(Path(place))) for place in found if place}
    return max(versions, key=lambda path: versions[path], default=None)


def cuda_version(program: Path) -> str:
    """Return the CUDA version of an nvcc or a cuobjdump, such as ``13.0``."""
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"release (\d+\.\d+)", done.stdout)
    if found is None:
        raise ReleaseError(f"{program} --version names no release")
    return found[1]


def listed_code(cuobjdump: Path, library: Path) -> set[str]:
    """Return the code that cuobjdump finds, such as ``sm_90a``; PTX as ``compute_90a``."""
    # Without --list-elf, which names code for 100f like code for 100.
    done = subprocess.run([cuobjdump, library], capture_output=True, text=True, check=False)
    codes = re.findall(r"^Fatbin (elf|ptx) code:\n=+\narch = sm_(\w+)$", done.stdout, re.MULTILINE)
    return {f"{'sm' if kind == 'elf' else 'compute'}_{number}" for kind, number in codes}
