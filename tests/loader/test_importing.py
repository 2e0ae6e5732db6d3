# SPDX-License-Identifier: BSD-3-Clause
"""Importing the package loads no slow modules, does not query the driver and allows a fork."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pack_files import compile_library

# Every call of this libcuda ends the process.
DEADLY_DRIVER = """
#include <stdlib.h>
int cuInit(unsigned flags) { abort(); }
int cuDriverGetVersion(int *version) { abort(); }
int cuDeviceGetCount(int *count) { abort(); }
int cuGetProcAddress_v2(const char *s, void **p, int v, unsigned long f, void *r) { abort(); }
"""

CALL = """
import os, sys, torch, flash_dmattn
x = torch.randn(1, 8, 2, 16)
def call(x):
    return flash_dmattn.flash_dmattn_func(x, x, x, is_causal=True)
"""

# From Python 3.15 on, distributors list the modules that they omit in the second.
STANDARD = {*sys.stdlib_module_names, "_missing_stdlib_info"}


def in_a_new_process(code: str, **variables: str) -> str:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("FLASH_DMATTN_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_imports_no_torch_and_opens_no_driver():
    printed = in_a_new_process(
        "import json, sys, flash_dmattn, flash_dmattn.loader\n"
        "maps = open('/proc/self/maps').read() if sys.platform == 'linux' else ''\n"
        "print(json.dumps(['torch' in sys.modules, 'numpy' in sys.modules,"
        " 'flash_dmattn._core' in sys.modules, 'libcuda.so' in maps, 'libnvidia-ml' in maps]))"
    )
    assert json.loads(printed) == [False] * 5


# Modules of names that no call needs; they are loaded on first use.
APART = {
    f"flash_dmattn.{name}"
    for name in (
        "explanation",
        "recorder",
        "reference_arguments",
        "forgetting",
        "forgetting_formula",
        "forgetting_ops",
        "modules.forgetting",
        "modules.forgetting_cache",
    )
}


def test_beyond_torch_only_this_package_and_the_standard_library_are_imported():
    """Importing takes milliseconds. torch._dynamo alone would take more than a second."""
    printed = in_a_new_process(
        "import json, sys, numpy, torch\n"
        "before = set(sys.modules)\n"
        "import flash_dmattn\n"
        "for name in flash_dmattn.__all__:\n"
        # Names that are bound to a backend check whether it can run here, and constants do so too.
        "    bound = name.startswith(('triton_', 'flex_')) or name.isupper()\n"
        "    if not bound: getattr(flash_dmattn, name)\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    new = json.loads(printed)
    assert "flash_dmattn.interface" in new
    new = [name for name in new if name != "torch.utils._device"]  # small, with one class
    foreign = {name.partition(".")[0] for name in new} - STANDARD
    assert foreign == {"flash_dmattn"}
    # The standard library modules that torch imports depend on its version.
    assert len({name for name in new if name.startswith("flash_dmattn")} - APART) < 60


def imported_by(code: str, *, beside: str = "", **variables: str) -> set[str]:
    """Return the modules that code imports in addition to those of other code."""
    template = (
        "import json, sys\n{code}\nprint('\\n' + json.dumps(sorted(set(sys.modules))), flush=True)"
    )
    names = [
        set(json.loads(in_a_new_process(template.format(code=c), **variables).splitlines()[-1]))
        for c in (code, beside)
    ]
    return names[0] - names[1]


def roots(modules: set[str]) -> set[str]:
    """Return the foreign packages of modules, and the slow submodules of torch by name."""
    slow = {name for name in modules if name.startswith(("torch._dynamo", "torch._inductor"))}
    return {name.partition(".")[0] for name in modules} - STANDARD | slow


DOCTOR = "from flash_dmattn.__main__ import main\nmain({arguments!r})"
OWN = {"flash_dmattn", "nanobind_backend"}


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"FLASH_DMATTN_BACKEND": "cup"},
        {"FLASH_DMATTN_BACKEND": "reference"},
        {"FLASH_DMATTN_CPU_SIMD": "baseline"},
    ],
)
def test_the_doctor_imports_no_torch_and_no_numpy(variables):
    """Importing torch alone takes ten times as long as the whole report."""
    assert roots(imported_by(DOCTOR.format(arguments=["--json"]), **variables)) <= OWN


def test_beyond_torch_the_selftest_imports_only_this_package():
    """In particular not sympy, which takes half a second, or the compiler."""
    code = DOCTOR.format(arguments=["--selftest", "--json"])
    new = imported_by(code, beside="import numpy, torch")
    assert roots(new) <= {*OWN, "torch"}
    slow = ("torch.fx.experimental.symbolic_shapes", "torch._dynamo", "torch._inductor")
    assert not [name for name in new if name.startswith(slow)]


ERRORS = """
import numpy, torch, flash_dmattn
from flash_dmattn import loader
x = torch.randn(1, 8, 2, 16)
for name in flash_dmattn.__all__:
    if not name.startswith(("triton_", "flex_")) and not name.isupper(): getattr(flash_dmattn, name)
func, varlen = flash_dmattn.flash_dmattn_func, flash_dmattn.flash_dmattn_varlen_func
"""
WRONG = """
before = set(sys.modules)
import os
os.environ["FLASH_DMATTN_FALLBACK"] = "error"
for wrong in (
    lambda: func(x, x[:, :, :1], x),
    lambda: func(x, x, x, torch.ones(3, 3)),
    lambda: func(numpy.zeros(3), x, x),
    lambda: func(x, x, x, backend="cup"),
    lambda: func(x, x, x, backend="cuda"),
    lambda: varlen(x, x, x, None, None, 1, 1),
    lambda: flash_dmattn.dynamic_mask(x, -1),
    lambda: flash_dmattn.flash_dmattn_func_auto("cup"),
    lambda: flash_dmattn.no_such_name,
    lambda: loader.pack_for("mps"),
    lambda: loader.environment.get("FLASH_DMATTN_LOG", {"FLASH_DMATTN_LOG": "loud"}),
    lambda: loader.environment.check_cpu_simd("none", {"FLASH_DMATTN_CPU_SIMD": "avx2"}),
):
    try:
        wrong()
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        str(error)
    else:
        raise AssertionError("nothing is wrong")
"""


def test_errors_import_nothing_that_is_slow():
    """Code that catches errors, maybe in a loop, must not wait for the compiler."""
    assert roots(imported_by(ERRORS + WRONG, beside=ERRORS)) <= OWN


def test_the_cpu_is_served_without_torch_and_without_the_driver():
    printed = in_a_new_process(
        "import json, sys, flash_dmattn.loader as loader\n"
        "pack = loader.pack_for('cpu')\n"
        "print(json.dumps([pack.name, loader.pack_for('cpu', 0) is pack, 'torch' in sys.modules,"
        " 'libcuda.so' in open('/proc/self/maps').read()]))"
    )
    assert json.loads(printed) == ["cpu", True, False, False]


@pytest.fixture
def deadly_driver(tmp_path: Path) -> dict[str, str]:
    """Return an environment whose libcuda.so.1 kills every process that calls it."""
    compile_library(DEADLY_DRIVER, tmp_path / "libcuda.so.1", "-Wl,-soname,libcuda.so.1")
    folders = [str(tmp_path), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {"LD_LIBRARY_PATH": ":".join(folders)}


@pytest.fixture
def driver_to_leave_alone(deadly_driver: dict[str, str]) -> dict[str, str]:
    """Return the environment of the deadly driver, or none if torch itself links with libcuda."""
    return deadly_driver if torch.version.cuda is None else {}


def test_the_deadly_driver_is_found(deadly_driver):
    environ = {**os.environ, **deadly_driver}
    code = "from flash_dmattn.loader import nvidia; nvidia.driver_versions()"
    done = subprocess.run([sys.executable, "-c", code], env=environ, check=False)
    assert done.returncode != 0


def test_importing_and_computing_on_the_cpu_ask_the_driver_nothing(driver_to_leave_alone):
    printed = in_a_new_process(
        CALL + "out = call(x)\nprint(out.shape == x.shape, torch.cuda.is_initialized())",
        **driver_to_leave_alone,
    )
    assert printed == "True False\n"


@pytest.mark.parametrize("before", ["", "import flash_dmattn.loader as l; l.pack_for('cpu')"])
def test_fork_after_import_works(driver_to_leave_alone, before):
    """As in data loaders: imports and packs opened before a fork work after it, on GPUs too."""
    printed = in_a_new_process(
        CALL + f"flash_dmattn.flash_dmattn_func\n{before}\n"
        "sys.stdout.flush()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    torch.set_num_threads(1)\n"
        "    results = [call(x)]\n"
        "    if torch.version.cuda and torch.cuda.is_available():\n"
        "        results.append(call(x.cuda().half()))\n"
        "    os._exit(0 if all(bool(r.isfinite().all()) for r in results) else 1)\n"
        "code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
        "print(code, bool(call(x).isfinite().all()), torch.cuda.is_initialized())",
        **driver_to_leave_alone,
    )
    assert printed == "0 True False\n"


def test_asking_for_the_current_gpu_does_not_initialize_cuda(monkeypatch):
    from types import SimpleNamespace

    from flash_dmattn.loader.facts import Machine

    def current_device():
        raise AssertionError("this initializes CUDA")

    cuda = SimpleNamespace(is_initialized=lambda: False, current_device=current_device)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert Machine().current_cuda_device() == 0
    cuda.is_initialized, cuda.current_device = lambda: True, lambda: 3
    assert Machine().current_cuda_device() == 3
