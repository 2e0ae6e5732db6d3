# SPDX-License-Identifier: BSD-3-Clause
"""Real packs of this installation, opened on any machine, and files that are not packs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import flash_dmattn
from flash_dmattn import _core
from flash_dmattn.loader import NoPackError, default_loader, open_pack
from flash_dmattn.loader.candidates import difference
from flash_dmattn.loader.facts import Machine
from flash_dmattn.loader.targets import find_targets
from pack_files import compile_library, compile_table, real_pack

PACKS = [candidate for candidate in default_loader.candidates() if not candidate.forced]
GPU_PACKS = [candidate for candidate in PACKS if candidate.device == "cuda"]
packs = pytest.mark.parametrize("candidate", PACKS, ids=lambda candidate: candidate.name)
gpu_packs = pytest.mark.parametrize("candidate", GPU_PACKS, ids=lambda candidate: candidate.name)


def test_there_is_a_cpu_pack():
    assert "cpu" in [candidate.name for candidate in PACKS]


@packs
def test_every_installed_pack_opens_and_is_what_its_manifest_says(candidate):
    pack = open_pack(candidate.path)
    assert (pack.name, pack.version) == (candidate.name, candidate.version)
    assert pack.abi_version == candidate.abi_version == _core.PACK_ABI_VERSION
    assert difference(candidate, pack) == ""
    assert pack.compiler
    assert pack.max_head_dim > 0
    assert set(pack.plan_layouts) == {"none", "keys", "intervals", "rows"}
    wanted = {"float16", "bfloat16"} | ({"float32"} if candidate.device == "cpu" else set())
    assert set(pack.dtypes) == wanted


@gpu_packs
def test_opening_a_gpu_pack_needs_no_driver_and_opens_none(candidate):
    code = (
        "from flash_dmattn.loader import open_pack\n"
        f"pack = open_pack({candidate.path!r})\n"
        "assert pack.arch and pack.cuda_version\n"
        "print('libcuda.so' in open('/proc/self/maps').read())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@gpu_packs
@pytest.mark.skipif(Machine().driver() is not None, reason="there is a driver")
def test_without_a_driver_a_gpu_pack_refuses_to_run(candidate):
    pack = open_pack(candidate.path)
    address, gpu = 1 << 20, (2, 0)
    query = (address, "float16", (1, 64, 2, 64), (8192, 128, 64, 1), *gpu)
    lse = (address, "float32", (1, 2, 64), (128, 64, 1), *gpu)
    problem = _core.Problem(pack, query, query, query, scale=1.0, causal=True, softcap=0.0)
    workspace = (address, "uint8", (max(1, problem.forward_workspace_bytes),), (1,), *gpu)
    with pytest.raises(RuntimeError) as caught:
        problem.forward(query, lse, None, workspace)
    assert str(caught.value) == (
        f"forward in kernel pack {pack.name}: device error (status 5): device 0: CUDA driver "
        "version is insufficient for CUDA runtime version (cudaErrorInsufficientDriver)"
    )


@gpu_packs
@pytest.mark.skipif(Machine().driver() is not None, reason="there is a driver")
def test_without_a_driver_the_loader_takes_no_gpu_pack(candidate):
    with pytest.raises(NoPackError) as caught:
        default_loader.pack_for("cuda", 0)
    line = f"{candidate.name} from {candidate.source}: refused: there is no NVIDIA driver"
    assert line in str(caught.value)


# A driver that reports one GPU and nothing else.
DRIVER = """
#include <stdio.h>
int cuDriverGetVersion(int *version) { *version = CUDA; return 0; }
int cuInit(unsigned flags) { return (int)flags; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int bytes, int device) {
  snprintf(name, bytes, "GPU %d", device); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? MAJOR : attribute == 76 ? MINOR : device; return 0; }
"""


@gpu_packs
@pytest.mark.skipif(Machine().driver() is not None, reason="there is a driver")
def test_the_loader_takes_and_opens_the_pack_of_the_gpu(candidate, tmp_path):
    preference = find_targets(map(Path, flash_dmattn.__path__)).preference
    capability = next(cc for cc, archs in preference.items() if archs[0] == candidate.arch)
    major, minor = capability.split(".")
    cuda = candidate.cuda_major
    defines = [f"-DMAJOR={major}", f"-DMINOR={minor}", f"-DCUDA={cuda}000"]
    compile_library(DRIVER, tmp_path / "libcuda.so.1", "-Wl,-soname,libcuda.so.1", *defines)
    code = "from flash_dmattn import loader; print(loader.pack_for('cuda', 0).path)"
    folders = ":".join(filter(None, [str(tmp_path), os.environ.get("LD_LIBRARY_PATH")]))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "LD_LIBRARY_PATH": folders, "FLASH_DMATTN_CUDA": str(cuda)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"{candidate.path}\n", done.stderr


def test_a_pack_stays_opened_though_its_file_goes(tmp_path):
    path = tmp_path / "copy.so"
    path.write_bytes(real_pack().read_bytes())
    pack = open_pack(str(path))
    path.unlink()
    assert pack.name == "cpu"
    assert pack.compiler == open_pack(str(real_pack())).compiler


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda path: compile_library("int nothing(void) { return 0; }", path),
            "the library is no kernel pack: it has no symbol flash_dmattn_pack",
        ),
        (
            lambda path: compile_table(".abi_version = 77", path),
            "the kernel pack has ABI version 77, but this flash_dmattn needs ABI version "
            f"{_core.PACK_ABI_VERSION}",
        ),
    ],
)
def test_other_libraries_are_no_packs(tmp_path, make, reason):
    path = make(tmp_path / "lib.so")
    with pytest.raises(_core.PackError) as caught:
        open_pack(str(path))
    assert str(caught.value).startswith(f"{path}: {reason}")


def test_the_report_of_the_real_loader_lists_every_pack():
    done = subprocess.run(
        [sys.executable, "-m", "flash_dmattn", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    listed = [pack["name"] for pack in json.loads(done.stdout)["packs"]]
    assert listed == [candidate.name for candidate in PACKS]
