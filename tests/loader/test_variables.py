# SPDX-License-Identifier: BSD-3-Clause
"""Every environment variable, valid, invalid and empty: the effect on calls, and the same verdict
of the doctor.
"""

import functools
import json
import os
import subprocess
import sys

import pytest
import torch

import flash_dmattn
from flash_dmattn.backends import portable
from flash_dmattn.loader import environment
from flash_dmattn.loader.environment import ENVIRONMENT, InvalidVariableError

CHECKED = [variable for variable in ENVIRONMENT.values() if variable.values]
INVALID = [(variable.name, value) for variable in CHECKED for value in ("cup", "avx1024", "a b")]


@pytest.fixture
def fresh_loader(monkeypatch, make_loader):
    """Return an undecided loader in a process without variables."""
    for name in environment.variables_set():
        monkeypatch.delenv(name)
    return make_loader()


def call(**options):
    x = torch.randn(1, 8, 2, 16)
    return flash_dmattn.flash_dmattn_func(x, x, x, is_causal=True, **options)


def run(*arguments, **variables):
    environ = {
        k: v for k, v in os.environ.items() if not k.startswith(("FLASH_DMATTN_", "TRITON_"))
    }
    return subprocess.run(
        [sys.executable, *arguments],
        env={**environ, "CUDA_VISIBLE_DEVICES": "", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def report_of(*arguments, **variables):
    done = run("-m", "flash_dmattn", "--json", *arguments, **variables)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["exit_code"] == done.returncode
    return report


@pytest.mark.parametrize("backend", [None, "cpu", "reference"])
@pytest.mark.parametrize(("name", "value"), INVALID)
def test_a_call_raises(fresh_loader, monkeypatch, name, value, backend):
    monkeypatch.setenv(name, value)
    for _ in range(2):  # repeated calls too
        with pytest.raises(InvalidVariableError, match=f"^{name} must be one of .*got '{value}'"):
            call(backend=backend)


@pytest.mark.parametrize("name", [variable.name for variable in CHECKED])
@pytest.mark.parametrize("value", ["", "  "])
def test_an_empty_value_is_none(fresh_loader, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert call().isfinite().all()


@pytest.mark.parametrize(("name", "value"), INVALID)
def test_the_doctor_says_so(name, value):
    report = report_of(**{name: value})
    (problem,) = report["problems"]
    assert problem.startswith(f"{name} must be one of ")
    assert f"got {value!r}" in problem
    assert not report["usable"]
    assert report["exit_code"] == 1
    assert report["devices"][0]["remedy"] == f"unset {name}"


@pytest.mark.parametrize("name", [variable.name for variable in CHECKED])
def test_the_doctor_says_so_in_its_text(name):
    done = run("-m", "flash_dmattn", **{name: "cup"})
    assert done.returncode == 1
    assert f"\nproblem       {name} must be one of " in done.stdout
    assert f"flash_dmattn is not usable: {name} must be one of " in done.stdout


@pytest.mark.parametrize("arguments", [["--json"], []])
def test_the_selftest_does_not_pass(arguments):
    done = run("-m", "flash_dmattn", "--selftest", *arguments, FLASH_DMATTN_BACKEND="cup")
    assert done.returncode == 2
    if arguments:
        assert not json.loads(done.stdout)["selftest"]["passed"]
    else:
        assert done.stdout.endswith(
            "  not tested: on no device above a call computes\nself-test FAILED\n"
        )


@pytest.mark.parametrize(
    ("name", "value"), [(v.name, value) for v in CHECKED for value in ("", *v.values)]
)
def test_the_doctor_judges_as_a_call_does(name, value):
    report = report_of(**{name: value})
    wrong = (name, value) in {
        ("FLASH_DMATTN_BACKEND", "cuda"),  # there is no GPU
        ("FLASH_DMATTN_BACKEND", "triton"),
        *([("FLASH_DMATTN_BACKEND", "flex")] if portable.why_unavailable("flex", "cpu") else []),
    }
    if name == "FLASH_DMATTN_CPU_SIMD":
        wrong = value not in ("", "auto", *levels())
    assert report["usable"] == (not wrong), report
    assert report["exit_code"] == int(wrong)
    assert report["warnings"] == []


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_backend_that_computes_on_no_device(fresh_loader, monkeypatch, backend):
    report = report_of("--selftest", FLASH_DMATTN_BACKEND=backend)
    assert report["exit_code"] == 2
    assert f"FLASH_DMATTN_BACKEND={backend}" in report["devices"][0]["calls"]
    monkeypatch.setenv("FLASH_DMATTN_BACKEND", backend)
    with pytest.raises((ValueError, RuntimeError)):
        call()


@pytest.mark.parametrize("backend", ["cpu", "flex", "reference"])
def test_the_selftest_is_of_the_backend_that_is_named(backend):
    if backend == "flex" and portable.why_unavailable("flex", "cpu"):
        pytest.skip("FlexAttention is not here")
    report = report_of("--selftest", FLASH_DMATTN_BACKEND=backend)
    assert report["selftest"]["passed"], report
    assert report["exit_code"] == 0


@functools.cache
def levels():
    """Return this CPU's SIMD levels, determined as in the pack."""
    found = []
    for value in ENVIRONMENT["FLASH_DMATTN_CPU_SIMD"].values[1:]:
        done = run(
            "-c",
            "from flash_dmattn.loader import default_loader as l, open_pack\n"
            "print(open_pack(l.candidates()[0].path).features)",
            FLASH_DMATTN_CPU_SIMD=value,
        )
        found.append(done.stdout.strip())
    return tuple(dict.fromkeys(found))


@pytest.mark.parametrize("spaces", ["", " "])
@pytest.mark.parametrize("level", ENVIRONMENT["FLASH_DMATTN_CPU_SIMD"].values[1:])
def test_a_program_runs_at_the_level_that_it_asks_for(level, spaces):
    code = "import flash_dmattn.loader as l; print(l.pack_for('cpu').features)"
    done = run("-c", code, FLASH_DMATTN_CPU_SIMD=f"{spaces}{level}{spaces}")
    if level in levels():
        assert done.stdout == f"{level}\n", done.stderr
    else:
        allowed = ", ".join(("auto", *levels()))
        assert done.stderr.splitlines()[-1].endswith(
            f"FLASH_DMATTN_CPU_SIMD must be one of {allowed}, which this CPU has, got {level!r}."
        )


def test_a_level_that_the_cpu_lacks_is_told_by_the_loader(fresh_loader, make_loader, monkeypatch):
    """On any CPU: the pack reports a lower level than the requested one."""
    from types import SimpleNamespace

    pack = fresh_loader.pack_for("cpu")
    names = ("name", "version", "compiler", "abi_version", "device_type", "cuda_version", "arch")
    lower = SimpleNamespace(**{n: getattr(pack, n) for n in names}, features="baseline")
    monkeypatch.setenv("FLASH_DMATTN_CPU_SIMD", "avx512")
    other = make_loader(open_pack=lambda path: lower)
    with pytest.raises(InvalidVariableError, match="must be one of auto, baseline, which this CPU"):
        other.pack_for("cpu")
    assert other.trace_for("cpu").pack is None
    assert other.trace_for("cpu").remedy == "unset FLASH_DMATTN_CPU_SIMD"


def test_a_file_that_is_absent_is_no_pack():
    report = report_of(FLASH_DMATTN_LIBRARY_PATH="/absent.so")
    assert report["exit_code"] == 1
    assert report["devices"][0]["remedy"] == "unset FLASH_DMATTN_LIBRARY_PATH"


def test_an_unknown_name_is_a_warning():
    report = report_of(FLASH_DMATTN_BACKED="cpu")
    assert report["warnings"] == [
        "unknown environment variable FLASH_DMATTN_BACKED. Did you mean 'FLASH_DMATTN_BACKEND'?"
    ]
    assert report["exit_code"] == 0
