# SPDX-License-Identifier: BSD-3-Clause
"""The driver queries, answered by a fake libcuda and NVML."""

import os
import shutil
import subprocess

import pytest

from flash_dmattn.loader import nvidia
from flash_dmattn.loader.facts import Device, Driver, Machine

CUDA = """
#include <stdio.h>
static int initialized = 0;
int cuDriverGetVersion(int *version) { *version = 12040; return 0; }
int cuInit(unsigned flags) { initialized = 1; return INIT_STATUS + (int)flags; }
int cuDeviceGetCount(int *count) { *count = 2; return initialized ? 0 : 3; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal + 10; return 0; }
int cuDeviceGetName(char *name, int bytes, int device) {
  snprintf(name, bytes, "GPU %d", device); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? device - 2 : attribute == 76 ? 6 : -1; return 0; }
"""
NVML = """
#include <stdio.h>
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned bytes) {
  snprintf(text, bytes, "550.54.14"); return 0; }
"""


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    """Return a function that compiles the libraries with a given status of cuInit."""
    compiler = next(filter(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang")), None)
    if compiler is None:
        pytest.skip("no C compiler")

    def make(init_status=0, nvml=True):
        for name, source in (("cuda", CUDA), ("nvml", NVML)):
            code, library = tmp_path / f"{name}.c", tmp_path / f"lib{name}.so"
            code.write_text(source)
            flags = ["-shared", "-fPIC", f"-DINIT_STATUS={init_status}"]
            subprocess.run([compiler, *flags, code, "-o", library], check=True)
        monkeypatch.setattr(nvidia, "_CUDA_LIBRARY", str(tmp_path / "libcuda.so"))
        found = tmp_path / ("libnvml.so" if nvml else "absent.so")
        monkeypatch.setattr(nvidia, "_NVML_LIBRARY", str(found))

    return make


def test_driver_and_devices(libraries):
    libraries()
    machine = Machine()
    assert machine.driver() == Driver("550.54.14", "12.4")
    assert machine.gpus() == (
        Device("cuda", 0, "GPU 10", "8.6"),
        Device("cuda", 1, "GPU 11", "9.6"),
    )


def test_the_version_needs_no_initialization(libraries):
    libraries(init_status=3)
    assert nvidia.driver_versions() == ("550.54.14", "12.4")


def test_a_driver_that_does_not_start_has_no_devices(libraries):
    libraries(init_status=999)
    assert nvidia.visible_devices() == []


def test_without_nvml_the_version_is_unknown(libraries):
    libraries(nvml=False)
    assert nvidia.driver_versions() == (None, "12.4")


def test_without_a_driver(monkeypatch):
    monkeypatch.setattr(nvidia, "_CUDA_LIBRARY", "libabsent.so.1")
    machine = Machine()
    assert machine.driver() is None
    assert machine.gpus() == ()
