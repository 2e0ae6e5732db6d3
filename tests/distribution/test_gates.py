# SPDX-License-Identifier: BSD-3-Clause
"""Every gate passes a good wheel and fails on a bad one."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from release import targets
from release.__main__ import main
from release.gates import GATES, packs

from .conftest import Judge
from .small_wheel import (
    BILL_FILE,
    CORE,
    CORE_FILE,
    CPU_FILE,
    GPU_FILE,
    INFO,
    LINUX,
    MANYLINUX,
    PACK,
    SmallWheel,
    fat_binary,
    link_to,
)

OTHER_MACHINE = "aarch64" if LINUX.endswith("x86_64") else "x86_64"


class Bad(NamedTuple):
    """A way to spoil a wheel, and the gate's expected message."""

    gate: str
    spoil: Callable[[SmallWheel], None]
    message: str
    tag: str | None = None  # in the file's name, if it differs from that of the WHEEL file
    complete: bool = False


def needs(path: str, soname: str, version: str = "") -> Callable[[SmallWheel], None]:
    return lambda wheel: link_to(wheel, path, soname, version)


def linked(path: str, *flags: str, before: str = "") -> Callable[[SmallWheel], None]:
    """Link a library of the wheel with other flags or with more code."""
    source = CORE if path == CORE_FILE else PACK
    return lambda wheel: wheel.replace_library(path, before + source, *flags)


def row(name: str, /, **changes: object) -> Callable[[SmallWheel], None]:
    """Change a pack's row of the manifest."""
    return lambda wheel: wheel.row(name).update(changes)


def add(path: str, content: bytes = b"x\n") -> Callable[[SmallWheel], None]:
    return lambda wheel: wheel.files.update({path: content})


def drop(path: str) -> Callable[[SmallWheel], None]:
    return lambda wheel: wheel.files.pop(path) and None


def edit(path: str, old: str, new: str) -> Callable[[SmallWheel], None]:
    return lambda wheel: wheel.edit(path, old, new)


def gpu_code(*entries: tuple[int, int]) -> Callable[[SmallWheel], None]:
    """Replace the GPU pack's device code."""
    return lambda wheel: wheel.replace_library(GPU_FILE, fat_binary(*entries) + PACK)


def second_pack(**changes: object) -> Callable[[SmallWheel], None]:
    """Add the pack of the other CUDA major for the same arch."""
    return lambda wheel: wheel.add_pack("cu12-sm90", fat_binary((2, 90)) + PACK, **changes)


def head(key: str, value: object) -> Callable[[SmallWheel], None]:
    return lambda wheel: wheel.head.update({key: value})


def retag(tag: str) -> Callable[[SmallWheel], None]:
    return lambda wheel: setattr(wheel, "tag", tag)


def unchanged(_: SmallWheel) -> None:
    pass


NOT_ABI3 = CORE.replace("PyModuleDef_Init", "PyUnicode_New")
MANY = f"cp310-abi3-{MANYLINUX}"
PROMISED = targets.load().wheel


def next_version(version: str) -> str:
    """Return the next newer version, which a wheel must not need."""
    *first, last = version.split(".")
    return ".".join([*first, str(int(last) + 1)])


GLIBC, GLIBCXX, CXXABI = (
    next_version(version) for version in (PROMISED.glibc, PROMISED.glibcxx, PROMISED.cxxabi)
)
FORBIDDEN = ("libcudart.so.13", "libcuda.so.1", "libnvrtc.so.12", "libtorch.so", "libc10.so")
# One pack's size limit in bytes.
LARGE = targets.load().wheel.max_cpu_pack_mb * 1_000_000
BAD = [
    *(Bad("needed", needs(GPU_FILE, name), f"needs {name}") for name in FORBIDDEN),
    Bad("needed", needs(CORE_FILE, "libtorch_python.so"), "_core.abi3.so needs libtorch_python.so"),
    Bad("needed", needs(CPU_FILE, "libstdc++.so.6"), "libflash_dmattn_cpu.so needs libstdc++.so.6"),
    Bad(
        "symbol-versions", needs(CPU_FILE, "libc.so.6", f"GLIBC_{GLIBC}"), f"GLIBC_{GLIBC}; ", MANY
    ),
    Bad("symbol-versions", needs(CPU_FILE, "libc.so.6", "GLIBC_2.100"), "GLIBC_2.100; ", MANY),
    Bad(
        "symbol-versions",
        needs(CORE_FILE, "libstdc++.so.6", f"GLIBCXX_{GLIBCXX}"),
        f"needs GLIBCXX_{GLIBCXX}; {PROMISED.policy} ends at GLIBCXX_{PROMISED.glibcxx}",
        MANY,
    ),
    Bad("symbol-versions", needs(CORE_FILE, "libstdc++.so.6", f"CXXABI_{CXXABI}"), "CXXABI", MANY),
    Bad("run-path", linked(CPU_FILE, "-Wl,-rpath,/usr/local/cuda/lib64"), "/usr/local/cuda/lib64"),
    Bad("run-path", linked(CORE_FILE, "-Wl,-rpath,$ORIGIN:/build"), "has the run path /build"),
    Bad(
        "run-path",
        linked(CPU_FILE, "-Wl,--disable-new-dtags,-rpath,$ORIGIN/../../torch/lib"),
        "$ORIGIN/../../torch/lib",
    ),
    Bad("exports", linked(CPU_FILE, "-fvisibility=default", before="int leak;\n"), "leak"),
    Bad("exports", linked(CORE_FILE, "-fvisibility=default", before="int leak;\n"), "exports 2"),
    Bad("exports", lambda wheel: wheel.replace_library(CPU_FILE, CORE), "not flash_dmattn_pack"),
    Bad("hardening", linked(CPU_FILE, "-Wl,-z,execstack"), "executable stack"),
    Bad("hardening", linked(CPU_FILE, "-Wl,-z,lazy"), "-z now"),
    Bad("hardening", linked(CPU_FILE, "-Wl,-z,norelro"), "cpu.so is not linked with -z relro"),
    Bad("hardening", linked(CORE_FILE, "-Wl,-z,norelro"), "_core.abi3.so is not linked with -z"),
    Bad(
        "hardening",
        linked(CPU_FILE, before='__asm__(".section .both,\\"awx\\"\\n.quad 0\\n.previous");\n'),
        "has writable code",
    ),
    Bad("hardening", linked(CPU_FILE, "-fno-stack-protector"), "without a stack protector"),
    Bad("hardening", linked(CPU_FILE, "-g"), "debug information"),
    Bad(
        "hardening",
        linked(
            CPU_FILE,
            "-Wl,-z,notext",
            before='extern int other; __asm__(".text\\n.quad other\\n");\n',
        ),
        "text relocations",
    ),
    Bad("machine", unchanged, f"the tag says {OTHER_MACHINE}", f"cp310-abi3-linux_{OTHER_MACHINE}"),
    Bad("machine", add("flash_dmattn/other.so", b""), "cannot be read as ELF"),
    Bad("tag", unchanged, "the WHEEL file says", MANY),
    Bad("tag", retag(f"cp312-abi3-{LINUX}"), "the tag is cp312-abi3"),
    Bad("tag", retag(f"cp310-cp310-{LINUX}"), "the tag is cp310-cp310"),
    Bad("tag", retag("cp310-abi3-manylinux_2_99_x86_64"), f"not cp310-abi3-{PROMISED.policy}_"),
    Bad("tag", edit(f"{INFO}/METADATA", "Version: 2", "Version: 3"), "the metadata has version"),
    Bad(
        "abi3-only",
        add("flash_dmattn/_extra.cpython-310-x86_64-linux-gnu.so"),
        "made for one version of Python",
    ),
    Bad("content", add("lib/libflash.so"), "the top level holds lib"),
    Bad("content", add("tests/test_x.py"), "the top level holds tests"),
    Bad("content", drop("flash_dmattn/targets.json"), "targets.json is absent"),
    Bad("content", add("flash_dmattn/__pycache__/a.cpython-310.pyc"), "does not belong"),
    Bad("content", add("flash_dmattn/pack.h"), "pack.h does not belong"),
    Bad("licences", drop(f"{INFO}/licenses/LICENSE"), "licenses/LICENSE is absent"),
    Bad("licences", add(f"{INFO}/licenses/LICENSE"), "differs from LICENSE"),
    Bad("licences", drop(f"{INFO}/licenses/LICENSE.cuda-runtime"), "cuda-runtime is absent"),
    Bad("materials", add(BILL_FILE, b"{}"), "is not the bill of the core"),
    Bad("licences", edit(f"{INFO}/METADATA", "License-File: LICENSE\n", ""), "no License-File"),
    Bad("licences", edit(f"{INFO}/METADATA", "License-Exp", "Licence-Exp"), "License-Expression"),
    Bad(
        "sizes",
        lambda wheel: wheel.files.update({CPU_FILE: wheel.files[CPU_FILE] + os.urandom(LARGE)}),
        f"cpu has {LARGE / 1e6:.1f} MB; at most {LARGE // 10**6} are allowed",
    ),
    Bad("manifest", row("cu13-sm90", sha256="0" * 64), "cu13-sm90 has sha256 '0000"),
    Bad("manifest", row("cpu", size=1), "cpu has size 1, not"),
    Bad("manifest", row("cpu", machine="riscv64"), "machine 'riscv64'"),
    Bad("manifest", row("cu13-sm90", code=["sm_90"]), "code ['sm_90'], not ['sm_90a']"),
    Bad("manifest", row("cu13-sm90", min_driver="525.60.13"), "not '580.65.06'"),
    Bad("manifest", row("cu13-sm90", cuda="12.4"), "built with CUDA 12.4"),
    Bad("manifest", row("cu13-sm90", name="cu13-sm75"), "cu13-sm75 is no pack of the table"),
    Bad("manifest", row("cpu", surprise=1), "cpu differs in fields: surprise"),
    Bad("manifest", drop(GPU_FILE), "cu13_sm90.so is listed, but absent"),
    Bad("manifest", lambda wheel: wheel.packs.pop() and None, "cu13_sm90.so is not listed"),
    Bad("manifest", lambda wheel: wheel.packs.append(wheel.packs[0]), "lists a file twice"),
    Bad("manifest", head("schema", 2), "schema 2, not 1"),
    Bad("manifest", head("version", "1.2.2"), "version '1.2.2'"),
    Bad("manifest", head("abi_version", 99), "abi_version 99"),
    Bad("manifest", add("flash_dmattn/targets.json", b"{}"), "targets.json is not the project's"),
    Bad("device-code", gpu_code((2, 80)), "cu13-sm90 holds sm_80; its manifest says sm_90"),
    Bad("device-code", gpu_code((2, 90), (1, 90)), "holds compute_90, sm_90;"),
    Bad("device-code", gpu_code(), "holds no device code"),
    Bad(
        "device-code",
        lambda wheel: wheel.replace_library(CPU_FILE, fat_binary((2, 90)) + PACK),
        "cpu holds sm_90; its manifest says no device code",
    ),
    Bad("same-kernels", second_pack(kernels="b" * 64), "the packs of sm90 hold different kernels"),
    Bad("same-kernels", second_pack(head_dims=[128]), "the packs of sm90 hold different kernels"),
    Bad("complete", unchanged, "the pack cu12-sm80 is absent", complete=True),
    Bad("complete", unchanged, "cu13-sm90 has the head dimensions [64] only", complete=True),
    Bad("complete", row("cpu", commit=None), "cpu comes of no commit", complete=True),
    Bad("complete", row("cpu", commit="c" * 40 + "-dirty"), "comes of no commit", complete=True),
    Bad("complete", second_pack(commit="d" * 40), "different commits", complete=True),
    Bad("auditwheel", needs(GPU_FILE, "libcudart.so.13"), "it would have to carry libcudart.so.13"),
    Bad(
        "auditwheel",
        needs(CPU_FILE, "libc.so.6", "GLIBC_2.39"),
        "it deserves the tag manylinux_2_39",
        MANY,
    ),
    Bad(
        "abi3audit",
        lambda wheel: wheel.replace_library(CORE_FILE, NOT_ABI3),
        "PyUnicode_New",
    ),
    Bad("check-wheel-contents", add("tests/__init__.py"), "W009"),
    Bad(
        "twine",
        edit(f"{INFO}/METADATA", "text/markdown\n\n# A small wheel", "text/x-rst\n\n.. broken::"),
        "syntax errors in markup",
    ),
]


@pytest.fixture(autouse=True)
def no_cuobjdump(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable cuobjdump: the small wheels' device code has only the section's headers."""
    monkeypatch.setattr(packs, "find_cuobjdump", lambda: None)


@pytest.mark.parametrize("gate", GATES)
def test_good_wheel_passes(gate: str, wheel: SmallWheel, tmp_path: Path, run_gate: Judge) -> None:
    wheel.tag = MANY
    result = run_gate(gate, wheel.save(tmp_path))
    assert result.failures == ()
    assert result.status in {"passed", "skipped"}


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: f"{bad.gate}: {bad.message}")
def test_bad_wheel_fails(bad: Bad, wheel: SmallWheel, tmp_path: Path, run_gate: Judge) -> None:
    bad.spoil(wheel)
    result = run_gate(bad.gate, wheel.save(tmp_path, bad.tag), complete=bad.complete)
    if result.status == "skipped":
        pytest.skip(result.skipped)
    assert any(bad.message in failure for failure in result.failures), result


def test_every_gate_has_a_bad_wheel() -> None:
    assert {bad.gate for bad in BAD} == set(GATES)


def test_wheel_size_is_limited(wheel: SmallWheel, tmp_path: Path, run_gate: Judge) -> None:
    table = targets.load()
    small = dataclasses.replace(table, wheel=dataclasses.replace(table.wheel, max_wheel_mb=0))
    (failure,) = run_gate("sizes", wheel.save(tmp_path), table=small).failures
    assert failure.startswith("the wheel has 0.")


def test_origin_is_a_good_run_path(wheel: SmallWheel, tmp_path: Path, run_gate: Judge) -> None:
    wheel.replace_library(CPU_FILE, PACK, "-Wl,-rpath,$ORIGIN")
    assert run_gate("run-path", wheel.save(tmp_path)).status == "passed"


def test_newer_symbols_are_fine_for_this_machine_only(
    wheel: SmallWheel, tmp_path: Path, run_gate: Judge
) -> None:
    link_to(wheel, CPU_FILE, "libc.so.6", "GLIBC_2.34")
    assert run_gate("symbol-versions", wheel.save(tmp_path)).status == "passed"


def test_both_majors_of_one_arch_pass(wheel: SmallWheel, tmp_path: Path, run_gate: Judge) -> None:
    second_pack()(wheel)
    path = wheel.save(tmp_path)
    for gate in ("manifest", "same-kernels"):
        assert run_gate(gate, path).status == "passed"


def test_absent_tool_is_skipped(
    wheel: SmallWheel, tmp_path: Path, run_gate: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run_gate("twine", wheel.save(tmp_path))
    assert (result.status, result.skipped) == (
        "skipped",
        "twine is not installed (the extra [gates] has it)",
    )


# --- the command


def check_wheel(*arguments: str | Path) -> int:
    return main(["gates", *map(str, arguments)])


def test_command_reports_what_it_found(wheel: SmallWheel, tmp_path: Path) -> None:
    path = wheel.save(tmp_path)
    file = tmp_path / "report.json"
    only = ["--only", "needed", "--only", "tag"]
    assert check_wheel(path, *only, "--report", file) == 0
    (found,) = json.loads(file.read_text())
    assert found["wheel"] == path.name
    assert found["size"] == path.stat().st_size
    assert set(found["packs"]) == {Path(CPU_FILE).name, Path(GPU_FILE).name}
    assert {gate: row["status"] for gate, row in found["gates"].items()} == {
        "needed": "passed",
        "tag": "passed",
    }


def test_command_fails_with_a_bad_wheel(
    wheel: SmallWheel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link_to(wheel, GPU_FILE, "libcudart.so.13")
    assert check_wheel(wheel.save(tmp_path), "--only", "needed", "--only", "tag") == 1
    done = capsys.readouterr()
    assert "needed: flash_dmattn/packs/libflash_dmattn_cu13_sm90.so needs libcudart" in done.err
    assert "failed  needed" in done.out
    assert "passed  tag" in done.out


def test_command_fails_with_what_is_no_wheel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "flash_dmattn-1-cp310-abi3-linux_x86_64.whl"
    file.write_text("no archive")
    assert check_wheel(file) == 1
    assert "cannot be unpacked" in capsys.readouterr().err


def test_command_lists_the_gates(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_wheel("--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(GATES)
    assert all(len(line.split()) > 3 for line in lines)
