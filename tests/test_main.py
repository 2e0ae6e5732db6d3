# SPDX-License-Identifier: BSD-3-Clause
"""``python -m flash_dmattn``: exit codes, the JSON's keys, the text, and the self-test."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from flash_dmattn import __main__ as command
from flash_dmattn import selftest
from flash_dmattn.loader import Loader, verify
from flash_dmattn.loader.facts import Device, Driver, Host, Torch
from flash_dmattn.selftest import with_torch


class FakeFacts:
    def __init__(self, *devices):
        self.devices = devices

    def package_version(self, distribution="flash-dmattn"):
        return "2.0.0a1"

    def host(self):
        return Host("x86_64", "glibc 2.35")

    def torch(self):
        return Torch("2.11.0", "13.0")

    def driver(self):
        return Driver("580.65.06", "13.0") if self.devices else None

    def gpus(self):
        return self.devices

    def after_fork(self):
        pass

    def current_cuda_device(self):
        return 0


@pytest.fixture
def loader_with(tmp_path):
    """Return a function that makes the loader of an installation with these packs and devices."""

    def make(packs, *devices):
        kinds = {
            "cpu": ("cpu", None, None, 1, 0, 0),
            "sm90": ("cuda", "13.0", "sm90", 2, 13000, 90),
        }
        rows, tables = [], {}
        (tmp_path / "packs").mkdir()
        for name in packs:
            device, cuda, arch, device_type, cuda_version, number = kinds[name]
            file = tmp_path / "packs" / f"{name}.so"
            file.touch()
            row = {"name": name, "file": file.name, "machine": "x86_64"}
            rows.append({**row, "device": device, "cuda": cuda, "arch": arch})
            tables[str(file)] = SimpleNamespace(
                name=name,
                version="2.0.0a1",
                compiler="compiler 1.0",
                features="",
                abi_version=1,
                device_type=device_type,
                cuda_version=cuda_version,
                arch=number,
            )
        manifest = {"schema": 1, "version": "2.0.0a1", "abi_version": 1, "packs": rows}
        (tmp_path / "packs" / "manifest.json").write_text(json.dumps(manifest))
        targets = {
            "schema": 1,
            "preference": {"9.0": ["sm90"]},
            "record": {"9.0": "run"},
            "cuda": {"13": {"min_driver": "580.65.06"}},
        }
        (tmp_path / "targets.json").write_text(json.dumps(targets))
        return Loader(
            FakeFacts(*devices), tables.__getitem__, lambda: 1, lambda: [tmp_path], list, environ={}
        )

    return make


HOPPER = Device("cuda", 0, "NVIDIA H200", "9.0")
TURING = Device("cuda", 0, "NVIDIA T4", "7.5")
WRONG = selftest.Comparison("cpu", "case", "float32", "out", 1.0, 1e-5)
RIGHT = selftest.Comparison("cpu", "case", "float32", "out", 1e-7, 1e-5)


@pytest.mark.parametrize(
    ("packs", "devices", "code"),
    [
        (["cpu"], [], 0),
        (["cpu", "sm90"], [HOPPER], 0),
        (["cpu"], [HOPPER], 1),
        (["cpu", "sm90"], [TURING], 1),
        (["cpu", "sm90"], [HOPPER, Device("cuda", 1, "NVIDIA T4", "7.5")], 1),
        ([], [], 1),
    ],
)
@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_exit_code(loader_with, capsys, packs, devices, code, arguments):
    assert command.main(arguments, loader_with(packs, *devices)) == code
    printed = capsys.readouterr().out
    if arguments:
        report = json.loads(printed)
        assert report["exit_code"] == code
        assert report["usable"] == (code == 0)
    else:
        assert printed.splitlines()[-1].startswith(
            "flash_dmattn is usable" if code == 0 else "flash_dmattn is not usable"
        )


@pytest.mark.parametrize(
    ("comparisons", "untested", "code"),
    [([RIGHT], [], 0), ([RIGHT, WRONG], [], 2), ([], [], 2), ([RIGHT], ["cuda:0: no torch"], 2)],
)
def test_exit_code_of_the_selftest(loader_with, capsys, monkeypatch, comparisons, untested, code):
    outcome = selftest.Outcome(tuple(comparisons), tuple(untested))
    monkeypatch.setattr(selftest, "run", lambda served, pack_for: outcome)
    assert command.main(["--selftest"], loader_with(["cpu"])) == code
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith("self-test passed" if code == 0 else "self-test FAILED")


@pytest.mark.parametrize(("problem", "code"), [("", 0), ("its sha256 is 1", 3)])
@pytest.mark.parametrize("arguments", [["--verify"], ["--verify", "--json"]])
def test_exit_code_of_the_verification(loader_with, capsys, monkeypatch, arguments, problem, code):
    checked = [verify.Checked("/packs/cpu.so", problem)]
    monkeypatch.setattr(verify, "verify", lambda candidates: checked)
    assert command.main(arguments, loader_with(["cpu"])) == code
    printed = capsys.readouterr().out
    if "--json" in arguments:
        report = json.loads(printed)
        assert report["verification"] == {
            "passed": code == 0,
            "files": [{"path": "/packs/cpu.so", "problem": problem or None}],
        }
    else:
        assert printed.endswith("verification passed\n" if code == 0 else "verification FAILED\n")


def test_a_usage_error_has_a_code_of_its_own(capsys):
    with pytest.raises(SystemExit) as caught:
        command.main(["--selfets"])
    assert caught.value.code == 64
    assert "unrecognized arguments: --selfets" in capsys.readouterr().err


def test_json_schema(loader_with, capsys):
    command.main(["--json"], loader_with(["cpu", "sm90"], HOPPER))
    report = json.loads(capsys.readouterr().out)
    assert list(report) == [
        "schema",
        "versions",
        "host",
        "cuda",
        "environment",
        "problems",
        "warnings",
        "packs",
        "devices",
        "usable",
        "verification",
        "selftest",
        "exit_code",
    ]
    assert report["schema"] == 1
    assert set(report["versions"]) == {"flash_dmattn", "python", "torch", "numpy"}
    assert set(report["host"]) == {"system", "machine", "libc"}
    assert report["cuda"] == {
        "torch": "13.0",
        "torch_rocm": None,
        "torch_xpu": None,
        "driver": "580.65.06",
        "driver_runs": "13.0",
    }
    cpu, gpu = report["devices"]
    assert set(cpu) == set(gpu)
    assert set(gpu) == {
        "kind",
        "index",
        "name",
        "capability",
        "text",
        "pack",
        "computes",
        "calls",
        "candidates",
        "trace",
        "problem",
        "warning",
        "remedy",
    }
    assert [pack["name"] for pack in report["packs"]] == ["cpu", "sm90"]
    assert set(report["packs"][0]) == {
        "name",
        "path",
        "source",
        "device",
        "cuda",
        "arch",
        "version",
        "sha256",
        "defect",
    }
    assert set(gpu["pack"]) == {"name", "path", "version", "compiler", "features"}
    assert [(c["name"], c["accepted"]) for c in gpu["candidates"]] == [
        ("sm90", True),
        ("cpu", False),
    ]
    assert set(gpu["candidates"][0]) == {"name", "path", "source", "accepted", "reason"}


def test_text_names_every_candidate_the_reason_and_the_fix(loader_with, capsys, monkeypatch):
    monkeypatch.setenv("FLASH_DMATTN_LOGG", "info")
    command.main([], loader_with(["cpu", "sm90"], TURING))
    printed = capsys.readouterr().out
    for part in (
        "driver        NVIDIA 580.65.06, runs CUDA 13.0",
        "set           FLASH_DMATTN_LOGG=info",
        "unknown environment variable FLASH_DMATTN_LOGG. Did you mean 'FLASH_DMATTN_LOG'?",
        "cuda:0 (NVIDIA T4, compute capability 7.5)",
        "sm90 from flash_dmattn: refused: no pack supports compute capability 7.5",
        "fix: export FLASH_DMATTN_BACKEND=reference",
        "cpu from flash_dmattn: accepted",
    ):
        assert part in printed


@pytest.mark.parametrize(
    ("backend", "devices", "code"),
    [
        ("cpu", [TURING], 0),
        ("cuda", [HOPPER], 0),
        ("cuda", [TURING], 1),
        ("cuda", [HOPPER, TURING], 1),
        ("cuda", [], 1),
        ("reference", [TURING], 0),
    ],
)
def test_what_the_variable_names_is_what_counts(
    loader_with, capsys, monkeypatch, backend, devices, code
):
    monkeypatch.setenv("FLASH_DMATTN_BACKEND", backend)
    devices = [replace(device, index=index) for index, device in enumerate(devices)]
    assert command.main([], loader_with(["cpu", "sm90"], *devices)) == code
    printed = capsys.readouterr().out
    if backend == "reference":
        assert printed.count("calls     are computed by FLASH_DMATTN_BACKEND=reference") == 2
        assert "fix:" not in printed
    if backend == "cuda" and not devices:
        assert "names what computes on no device above" in printed


def test_what_a_selftest_raises_is_why_it_did_not_test(monkeypatch):
    def broken(device):
        raise RuntimeError("no memory")

    monkeypatch.setattr(with_torch, "compare", broken)
    outcome = selftest.run([("cpu", 0)], None)
    assert outcome.untested == ("cpu: RuntimeError: no memory",)
    assert not outcome.passed


def test_nan_is_wrong():
    row = selftest.Comparison("cpu", "case", "float32", "out", float("nan"), 1e-5)
    assert not row.passed
    assert "WRONG" in str(selftest.Outcome((row,), ()))


def test_without_torch_and_numpy_the_selftest_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    outcome = selftest.run([("cpu", 0), ("cuda", 0)], None)
    assert not outcome.passed
    assert outcome.untested == (
        "cpu: needs PyTorch or NumPy: python -m pip install torch",
        "cuda:0: needs PyTorch: python -m pip install torch",
    )


def test_the_real_command_and_its_selftest():
    environ = {k: v for k, v in os.environ.items() if not k.startswith("FLASH_DMATTN_")}
    done = subprocess.run(
        [sys.executable, "-m", "flash_dmattn", "--json", "--selftest"],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(done.stdout)
    assert report["devices"][0]["pack"]["name"] == "cpu", done.stdout
    assert report["selftest"]["passed"], done.stdout
    assert {row["result"] for row in report["selftest"]["comparisons"]} == {
        "out",
        "lse",
        "dq",
        "dk",
        "dv",
        "dbias",
    }


def test_the_selftest_of_numpy_alone():
    pytest.importorskip("numpy")
    from flash_dmattn.loader import pack_for
    from flash_dmattn.selftest.with_numpy import compare

    rows = list(compare(pack_for("cpu")))
    assert len(rows) > 25
    assert [row for row in rows if not row.passed] == []
