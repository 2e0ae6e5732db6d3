# SPDX-License-Identifier: BSD-3-Clause
"""Running CMake and pip: packs into a folder, and a wheel around them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from wheels.project import ROOT, commit
from wheels.targets import Limits

__all__ = ["BuildError", "PackOptions", "assemble", "build_packs", "find_nvcc", "nvcc_version"]

PackOptions = Mapping[str, str]


class BuildError(RuntimeError):
    """Something that a build needs is absent or refuses to work; the text says what to do."""


def run(command: Sequence[str | Path], jobs: int | None = None) -> None:
    """Run a command, shown and with its output passed on; ``jobs`` becomes MAX_JOBS."""
    environment = dict(os.environ)
    if jobs is not None:
        environment["MAX_JOBS"] = str(jobs)
    words = [str(word) for word in command]
    print("+", *words, file=sys.stderr, flush=True)
    try:
        # stdout is for the command's own result
        subprocess.run(words, check=True, env=environment, stdout=sys.stderr)
    except FileNotFoundError as error:
        raise BuildError(f"there is no program {words[0]}") from error
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{words[0]} failed with status {error.returncode}") from error


def find_nvcc(named: str | None) -> Path:
    """Return the nvcc that was named, or the one that CMake would find."""
    folders = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", "")]
    guesses = [f"{folder}/bin/nvcc" for folder in folders if folder]
    candidates = [named] if named else [os.environ.get("CUDACXX"), "nvcc", *guesses]
    candidates += [] if named else ["/usr/local/cuda/bin/nvcc"]
    for candidate in candidates:
        found = shutil.which(candidate) if candidate else None
        if found:
            return Path(found)
    raise BuildError(
        f"there is no nvcc {named}"
        if named
        else "no nvcc was found (looked at CUDACXX, PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda)"
    )


def nvcc_version(nvcc: Path) -> str:
    """Return an nvcc's version, such as ``13.0``."""
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+\.\d+)", text)
    if found is None:
        raise BuildError(f"{nvcc} --version names no release")
    return found[1]


def build_packs(
    nvcc: Path, output: Path, build_dir: Path | None, options: PackOptions, jobs: int | None
) -> Path:
    """Build CUDA packs and put them and their manifest into a folder, alone.

    Args:
        nvcc: the compiler.
        output: the folder; emptied first, since its manifest must describe all that is in it.
        build_dir: where CMake works, kept; a temporary folder if None.
        options: more CMake options.
        jobs: the most compilers at once; None leaves it to memory and Ninja.
    """
    with tempfile.TemporaryDirectory() as scratch:
        build = build_dir or Path(scratch) / "build"
        stage = Path(scratch) / "stage"
        definitions = {
            "FLASH_DMATTN_CORE": "OFF",
            "FLASH_DMATTN_CPU": "OFF",
            "FLASH_DMATTN_CUDA": "ON",
            "FLASH_DMATTN_COMMIT": commit(),
            "FLASH_DMATTN_PREBUILT_PACKS": "",
            "CMAKE_CUDA_COMPILER": str(nvcc),
            **options,
        }
        flags = [f"-D{name}={value}" for name, value in definitions.items()]
        run(["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", *flags], jobs)
        run(["cmake", "--build", build], jobs)
        run(["cmake", "--install", build, "--strip", "--prefix", stage])
        if output.exists():
            shutil.rmtree(output)
        output.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(stage / "flash_dmattn" / "packs", output)
    return output


def assemble(
    packs: Sequence[Path], output: Path, manylinux: Limits | None, machine: str, isolate: bool
) -> Path:
    """Build the core and the cpu pack, add packs that were built before, and return the wheel.

    Args:
        packs: folders that `build_packs` made.
        output: where the wheel goes.
        manylinux: retag the wheel for this policy; None leaves the tag of the machine.
        machine: such as ``x86_64``.
        isolate: let pip fetch the build requirements, instead of taking those that are installed.
    """
    folders = [folder.resolve() for folder in packs]
    for folder in folders:
        if not (folder / "manifest.json").is_file():
            raise BuildError(f"{folder} has no manifest.json; scripts/build_packs.py makes both")
    definitions = {
        "FLASH_DMATTN_CUDA": "OFF",
        "FLASH_DMATTN_COMMIT": commit(),
        "FLASH_DMATTN_PREBUILT_PACKS": ";".join(map(str, folders)),
    }
    settings = [f"--config-settings=cmake.define.{k}={v}" for k, v in definitions.items()]
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        # A build folder of its own: one that is left from another build has that build's options.
        settings.append(f"--config-settings=build-dir={scratch}/build")
        wheels = Path(scratch) / "wheels"
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps"]
        command += [] if isolate else ["--no-build-isolation"]
        run([*command, "--wheel-dir", wheels, *settings, ROOT])
        (wheel,) = wheels.glob("*.whl")
        if manylinux is not None:
            wheel = _repair(wheel, Path(scratch) / "repaired", f"{manylinux.policy}_{machine}")
        target = output / wheel.name
        target.unlink(missing_ok=True)
        return Path(shutil.move(wheel, target))


def _repair(wheel: Path, folder: Path, platform: str) -> Path:
    """Return the wheel under a manylinux tag, if auditwheel finds that it deserves it.

    CUDA's libraries are excluded so that one which is needed by mistake is seen by the gates,
    rather than copied into the wheel.
    """
    excludes = ["--exclude=libcuda.so*", "--exclude=libcudart.so*"]
    command = [sys.executable, "-m", "auditwheel", "repair", "--plat", platform, "--only-plat"]
    run([*command, *excludes, "--wheel-dir", folder, wheel])
    (repaired,) = folder.glob("*.whl")
    return repaired
