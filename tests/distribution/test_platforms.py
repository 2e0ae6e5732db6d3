# SPDX-License-Identifier: BSD-3-Clause
"""The decisions of cmake/Platform.cmake for systems that are not at hand."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from release.project import ROOT

pytestmark = pytest.mark.skipif(not shutil.which("cmake"), reason="no cmake")

LINUX = {
    "FLASH_DMATTN_CORE": "ON",
    "FLASH_DMATTN_CPU": "ON",
    "FLASH_DMATTN_CUDA": "AUTO",
    "CMAKE_SYSTEM_NAME": "Linux",
    "CMAKE_SYSTEM_PROCESSOR": "x86_64",
    "CMAKE_SIZEOF_VOID_P": "8",
    "CMAKE_CXX_BYTE_ORDER": "LITTLE_ENDIAN",
    "CMAKE_CXX_COMPILER_ID": "GNU",
    "CMAKE_CXX_COMPILER_FRONTEND_VARIANT": "GNU",
    "CMAKE_OSX_ARCHITECTURES": "",
}
MACOS = {
    **LINUX,
    "CMAKE_SYSTEM_NAME": "Darwin",
    "CMAKE_SYSTEM_PROCESSOR": "arm64",
    "CMAKE_CXX_COMPILER_ID": "AppleClang",
}
WINDOWS = {
    **LINUX,
    "CMAKE_SYSTEM_NAME": "Windows",
    "CMAKE_SYSTEM_PROCESSOR": "AMD64",
    "CMAKE_CXX_COMPILER_ID": "Clang",
}
NOTHING = {"FLASH_DMATTN_CORE": "OFF", "FLASH_DMATTN_CPU": "OFF", "FLASH_DMATTN_CUDA": "OFF"}


def decide(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Return the build's decisions for a system with these facts."""
    lines = [
        "cmake_minimum_required(VERSION 3.26...4.4)",
        f'list(APPEND CMAKE_MODULE_PATH "{(ROOT / "cmake").as_posix()}")',
        "include(Platform)",
        *(f'set({name} "{value}")' for name, value in variables.items()),
        "fdm_require_supported_platform()",
        "fdm_machine(machine)",
        "fdm_library_name(prefix suffix)",
        'message(NOTICE "${machine} ${prefix}pack${suffix}")',
    ]
    script = folder / "decide.cmake"
    script.write_text("\n".join(lines))
    return subprocess.run(
        ["cmake", "-P", script], capture_output=True, text=True, check=False, cwd=folder
    )


@pytest.mark.parametrize(
    "facts, decided",
    [
        (LINUX, "x86_64 libpack.so"),
        ({**LINUX, "CMAKE_SYSTEM_PROCESSOR": "riscv64"}, "riscv64 libpack.so"),
        (MACOS, "aarch64 libpack.dylib"),
        ({**MACOS, "CMAKE_OSX_ARCHITECTURES": "x86_64"}, "x86_64 libpack.dylib"),
        (WINDOWS, "x86_64 pack.dll"),
    ],
)
def test_names_are_those_of_the_system(facts: dict[str, str], decided: str, tmp_path: Path) -> None:
    done = decide(tmp_path, **facts)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == decided


@pytest.mark.parametrize(
    "facts, complaint",
    [
        ({**LINUX, "CMAKE_SYSTEM_NAME": "FreeBSD"}, "this is FreeBSD x86_64"),
        ({**LINUX, "CMAKE_SIZEOF_VOID_P": "4"}, "builds on 64-bit"),
        ({**LINUX, "CMAKE_CXX_BYTE_ORDER": "BIG_ENDIAN"}, "little-endian"),
        ({**WINDOWS, "CMAKE_CXX_COMPILER_ID": "MSVC"}, "needs GCC or clang"),
        ({**WINDOWS, "CMAKE_CXX_COMPILER_FRONTEND_VARIANT": "MSVC"}, "set CXX=clang"),
        ({**WINDOWS, "CMAKE_CXX_COMPILER_ID": "GNU"}, "on Windows flash-dmattn needs clang"),
        ({**MACOS, "CMAKE_OSX_ARCHITECTURES": "arm64;x86_64"}, "one machine at a time"),
    ],
)
def test_what_cannot_be_built_is_told(
    facts: dict[str, str], complaint: str, tmp_path: Path
) -> None:
    done = decide(tmp_path, **facts)
    assert done.returncode != 0
    assert complaint in re.sub(r"\s+", " ", done.stderr)


def test_the_package_alone_needs_no_compiler_of_ours(tmp_path: Path) -> None:
    facts = {**WINDOWS, "CMAKE_CXX_COMPILER_ID": "MSVC", **NOTHING}
    assert decide(tmp_path, **facts).returncode == 0
