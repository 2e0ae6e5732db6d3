# SPDX-License-Identifier: BSD-3-Clause
"""The programs of tests/emulator, which run kernels on the CPU by cpp/emulator."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ["-std=c++20", "-O1", "-w", "-fno-extern-tls-init", "-U_FORTIFY_SOURCE", "-pthread"]


def output(command: list[str], **environment: str) -> str:
    """Run a command and return its output."""
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, **environment}
    ).stdout


def compiled(name: str, folder: Path, *flags: str) -> str:
    """Compile a program into a folder, and return its path; skip the test without GCC."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or ""
    if not compiler or "Free Software" not in output([*compiler.split(), "--version"]):
        pytest.skip("the emulator needs GCC")
    emulator, path = ROOT / "cpp" / "emulator", folder / name
    sources = [ROOT / "tests" / "emulator" / f"{name}.cpp"]
    sources += [emulator / "machine.cpp", emulator / "driver.cpp"]
    folders = [f"-I{emulator}", f"-I{ROOT / 'cpp'}"]
    options = [*FLAGS, *folders, *flags, *map(str, sources), "-o", str(path)]
    output([*compiler.split(), *options])
    return str(path)
