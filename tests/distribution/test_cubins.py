# SPDX-License-Identifier: BSD-3-Clause
"""Device code reads the same with and without cuobjdump; the gate reports unknown code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from release import targets
from release.binaries import read_library
from release.gates import packs
from release.programs import cuda_version, find_cuobjdump, find_nvcc, listed_code
from release.project import ReleaseError
from release.targets import version_numbers

from .conftest import Judge
from .small_wheel import GPU_FILE, PACK, SmallWheel, compile_library, compiler, fat_binary

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C compiler")


@needs_compiler
@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([], set()),
        ([(2, 90)], {"sm_90"}),
        ([(2, 80), (2, 86)], {"sm_80", "sm_86"}),
        ([(1, 90)], {"compute_90"}),
        ([(9, 90)], {"kind9_90"}),
    ],
)
def test_entries_of_a_fat_binary(
    entries: list[tuple[int, int]], expected: set[str], tmp_path: Path
) -> None:
    library = tmp_path / "library.so"
    compile_library(fat_binary(*entries) + PACK, library)
    assert read_library(library.read_bytes()).device_code == expected


@needs_compiler
def test_several_fat_binaries_with_gaps(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    second = fat_binary((1, 89)).replace("fat_binary", "second")
    gap = 'static const long gap[3] __attribute__((used, section(".nv_fatbin"))) = {0};\n'
    compile_library(fat_binary((2, 80)) + gap + second + PACK, library)
    assert read_library(library.read_bytes()).device_code == {"sm_80", "compute_89"}


@needs_compiler
def test_library_without_device_code(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    compile_library(PACK, library)
    assert read_library(library.read_bytes()).device_code == set()
    cuobjdump = find_cuobjdump()
    if cuobjdump is not None:
        assert listed_code(cuobjdump, library) == set()


@pytest.mark.parametrize("ptx", [False, True])
def test_cuobjdump_agrees(ptx: bool, tmp_path: Path) -> None:
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        pytest.skip("no cuobjdump")
    try:
        nvcc = find_nvcc(None)
    except ReleaseError as error:
        pytest.skip(str(error))
    if version_numbers(cuda_version(cuobjdump)) < version_numbers(cuda_version(nvcc)):
        pytest.skip(f"{cuobjdump} is older than nvcc {cuda_version(nvcc)}")
    source = tmp_path / "kernel.cu"
    source.write_text("__global__ void kernel(float *x) { *x += 1.0f; }\n")
    library = tmp_path / "kernel.o"  # linking with nvcc would add a fat binary of its own
    cuda_12 = cuda_version(nvcc).startswith("12.")
    flags = ["-Xfatbin=-compress-all" if cuda_12 else "--compress-mode=size", "-Xcompiler=-fPIC"]
    able = [arch.code.removeprefix("sm_") for arch in targets.load().archs_of(cuda_version(nvcc))]
    flags += [f"--generate-code=arch=compute_{arch},code=sm_{arch}" for arch in able]
    flags += ["--generate-code=arch=compute_86,code=compute_86"] if ptx else []
    subprocess.run([nvcc, "-c", *flags, "-o", library, source], check=True)

    expected = {f"sm_{arch}" for arch in able} | ({"compute_86"} if ptx else set())
    found = listed_code(cuobjdump, library)
    assert found == expected
    assert read_library(library.read_bytes()).device_code == {
        code.rstrip("af") for code in expected
    }


# --- the gate


def fake_cuobjdump(folder: Path, version: str, listing: str) -> Path:
    """Write a cuobjdump of this CUDA version that runs ``listing`` for a library."""
    program = folder / "cuobjdump"
    program.write_text(
        "#!/bin/sh\n"
        "case $1 in\n"
        f"--version) echo 'Cuda compilation tools, release {version}, V{version}.0' ;;\n"
        f"*) {listing} ;;\n"
        "esac\n"
    )
    program.chmod(0o755)
    return program


def listing(arch: str) -> str:
    """Return the command that prints cuobjdump's listing of a library with code of this arch."""
    return f"printf 'Fatbin elf code:\\n================\\narch = {arch}\\n'"


def test_old_cuobjdump_is_not_asked(
    wheel: SmallWheel, tmp_path: Path, run_gate: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuobjdump of CUDA 12.4 reports 90 for code that CUDA 13 compiled for 90a."""
    old = fake_cuobjdump(tmp_path, "12.4", "exit 1")
    monkeypatch.setattr(packs, "find_cuobjdump", lambda: old)
    wheel.replace_library(GPU_FILE, fat_binary((2, 80)) + PACK)
    (failure,) = run_gate("device-code", wheel.save(tmp_path)).failures
    assert failure == "cu13-sm90 holds sm_80; its manifest says sm_90"


def test_without_cuobjdump_the_kind_of_code_is_not_known(
    wheel: SmallWheel, tmp_path: Path, run_gate: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The section's headers say 90 for both sm_90a and sm_90: no verdict is possible."""
    monkeypatch.setattr(packs, "find_cuobjdump", lambda: None)
    result = run_gate("device-code", wheel.save(tmp_path))
    assert (result.status, result.failures) == ("skipped", ())
    assert "no cuobjdump as new as cu13-sm90" in result.skipped
    wheel.packs = [row for row in wheel.packs if row["name"] == "cpu"]
    wheel.add_pack("cu12-sm80", fat_binary((2, 80)) + PACK)
    assert run_gate("device-code", wheel.save(tmp_path)).status == "passed"


def test_cuobjdump_tells_the_kinds_apart(
    wheel: SmallWheel, tmp_path: Path, run_gate: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = fake_cuobjdump(tmp_path, "13.1", listing("sm_90"))
    monkeypatch.setattr(packs, "find_cuobjdump", lambda: program)
    wheel.packs = [row for row in wheel.packs if row["name"] != "cpu"]
    (failure,) = run_gate("device-code", wheel.save(tmp_path)).failures
    assert failure == "cu13-sm90 holds sm_90; its manifest says sm_90a"


def test_cuobjdump_is_given_the_pack(
    wheel: SmallWheel, tmp_path: Path, run_gate: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = f'cp "$1" {tmp_path}/given; {listing("sm_90a")}'
    program = fake_cuobjdump(tmp_path, "13.1", commands)
    monkeypatch.setattr(packs, "find_cuobjdump", lambda: program)
    wheel.packs = [row for row in wheel.packs if row["name"] != "cpu"]
    assert run_gate("device-code", wheel.save(tmp_path)).failures == ()
    assert (tmp_path / "given").read_bytes() == wheel.files[GPU_FILE]
