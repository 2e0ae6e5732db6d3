# SPDX-License-Identifier: BSD-3-Clause
"""The driver that tests a cpu pack without Python; `scripts/test_cross` runs it elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flash_dmattn.loader import environment, pack_for

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = next(filter(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++")), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("driver") / "driver"
    sources = ["tests/cross/driver.cpp", "cpp/core/shared_library.cpp"]
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-I", "cpp"]
    libraries = ["-ldl"] if sys.platform == "linux" else []
    subprocess.run([compiler, *flags, *sources, "-o", program, *libraries], cwd=ROOT, check=True)
    return program


def drive(driver: Path, pack: str, level: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [driver, pack, level],
        env={**os.environ, "FLASH_DMATTN_CPU_SIMD": level},
        capture_output=True,
        text=True,
        check=False,
    )


def levels() -> list[str]:
    """Return this processor's SIMD levels up to the one that the pack selects."""
    known = environment.ENVIRONMENT["FLASH_DMATTN_CPU_SIMD"].values[1:]
    return list(known[: known.index(pack_for("cpu").features) + 1])


@pytest.mark.parametrize("level", levels())
def test_the_installed_pack_passes(driver: Path, level: str) -> None:
    done = drive(driver, pack_for("cpu").path, level)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("driver: passed\n")
    assert f"runs at {level}" in done.stdout


def test_another_level_is_an_error(driver: Path) -> None:
    done = drive(driver, pack_for("cpu").path, "neon")
    assert done.returncode == 1
    assert "it should run at neon" in done.stderr


def test_what_is_no_pack_is_an_error(driver: Path, tmp_path: Path) -> None:
    done = drive(driver, str(tmp_path / "absent.so"), "baseline")
    assert done.returncode == 1
    assert "dlopen failed" in done.stderr
