# SPDX-License-Identifier: BSD-3-Clause
"""The effect of CMake's options: prebuilt packs, job limits, binaries without paths."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile

from release import targets
from release.__main__ import main
from release.programs import find_nvcc
from release.project import ROOT, ReleaseError, abi_version

from .small_wheel import VERSION, SmallWheel, describe

pytestmark = pytest.mark.skipif(
    not (shutil.which("cmake") and shutil.which("ninja") and shutil.which("c++")),
    reason="no cmake, ninja or C++ compiler",
)
NOTHING = dict.fromkeys(("FLASH_DMATTN_CORE", "FLASH_DMATTN_CPU", "FLASH_DMATTN_CUDA"), "OFF")


def cmake(
    build: Path, root: Path = ROOT, variables: dict[str, str] | None = None, **options: str
) -> subprocess.CompletedProcess[str]:
    """Configure a build that compiles nothing unless the options say otherwise."""
    flags = [f"-D{name}={value}" for name, value in (NOTHING | options).items()]
    environment = {k: v for k, v in os.environ.items() if k != "MAX_JOBS"} | (variables or {})
    return subprocess.run(
        ["cmake", "-S", root, "-B", build, "-G", "Ninja", *flags],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


def said(done: subprocess.CompletedProcess[str]) -> str:
    """Return CMake's complaint on one line."""
    return " ".join(done.stderr.split())


def install(build: Path, prefix: Path) -> dict[str, Any]:
    """Install a build and return the manifest."""
    subprocess.run(["cmake", "--install", build, "--prefix", prefix], check=True)
    manifest = json.loads((prefix / "flash_dmattn" / "packs" / "manifest.json").read_text())
    assert isinstance(manifest, dict)
    return manifest


def pack_folder(folder: Path, *names: str, **changes: Any) -> Path:
    """Write a folder as `python -m release packs` does; each pack holds its own name."""
    folder.mkdir()
    rows = []
    for name in names:
        file = f"libflash_dmattn_{name.replace('-', '_')}.so"
        (folder / file).write_text(name)
        facts = {"sha256": hashlib.sha256(name.encode()).hexdigest(), "size": len(name)}
        rows.append(describe(name, file) | facts)
    head = {"schema": 1, "version": VERSION, "abi_version": abi_version(), "packs": rows} | changes
    (folder / "manifest.json").write_text(json.dumps(head))
    return folder


# --- prebuilt packs


def test_prebuilt_packs_are_installed_unchanged(tmp_path: Path) -> None:
    older = pack_folder(tmp_path / "cu12", "cu12-sm80", "cu12-sm90")
    newer = pack_folder(tmp_path / "cu13", "cu13-sm90")
    done = cmake(tmp_path / "build", FLASH_DMATTN_PREBUILT_PACKS=f"{older};{newer}")
    assert done.returncode == 0, done.stderr
    manifest = install(tmp_path / "build", tmp_path / "out")
    packs = [json.loads((f / "manifest.json").read_text())["packs"] for f in (older, newer)]
    assert manifest["packs"] == packs[0] + packs[1]
    installed = tmp_path / "out" / "flash_dmattn" / "packs"
    assert {path.name: path.read_text() for path in installed.glob("*.so")} == {
        "libflash_dmattn_cu12_sm80.so": "cu12-sm80",
        "libflash_dmattn_cu12_sm90.so": "cu12-sm90",
        "libflash_dmattn_cu13_sm90.so": "cu13-sm90",
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, 'its manifest says schema "2", this build needs "1"'),
        ({"version": "1.2.2"}, f'says version "1.2.2", this build needs "{VERSION}"'),
        ({"abi_version": 99}, 'its manifest says abi_version "99"'),
    ],
)
def test_prebuilt_packs_of_another_build_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = pack_folder(tmp_path / "packs", "cu13-sm90", **changes)
    done = cmake(tmp_path / "build", FLASH_DMATTN_PREBUILT_PACKS=str(folder))
    assert done.returncode != 0
    assert message in said(done)


def test_changed_pack_is_refused(tmp_path: Path) -> None:
    folder = pack_folder(tmp_path / "packs", "cu13-sm90")
    (folder / "libflash_dmattn_cu13_sm90.so").write_text("changed")
    done = cmake(tmp_path / "build", FLASH_DMATTN_PREBUILT_PACKS=str(folder))
    assert done.returncode != 0
    assert "its manifest says sha256" in said(done)


def test_pack_of_another_machine_is_refused(tmp_path: Path) -> None:
    folder = pack_folder(tmp_path / "packs", "cu13-sm90")
    path = folder / "manifest.json"
    path.write_text(re.sub(r'"machine": "\w+"', '"machine": "riscv64"', path.read_text()))
    done = cmake(tmp_path / "build", FLASH_DMATTN_PREBUILT_PACKS=str(folder))
    assert 'pack cu13-sm90: its manifest says machine "riscv64"' in said(done)


@pytest.mark.parametrize("before", ["{folder}/", "../packs/"])
def test_pack_elsewhere_is_refused(before: str, tmp_path: Path) -> None:
    folder = pack_folder(tmp_path / "packs", "cu13-sm90")
    path = folder / "manifest.json"
    file = before.format(folder=folder) + "libflash_dmattn_cu13_sm90.so"
    path.write_text(path.read_text().replace("libflash_dmattn_cu13_sm90.so", file))
    done = cmake(tmp_path / "build", FLASH_DMATTN_PREBUILT_PACKS=str(folder))
    assert f'says file "{file}", which is no name of a file beside the manifest' in said(done)


def test_absent_pack_is_refused(tmp_path: Path) -> None:
    folder = pack_folder(tmp_path / "packs", "cu13-sm90")
    (folder / "libflash_dmattn_cu13_sm90.so").unlink()
    done = cmake(tmp_path / "build", FLASH_DMATTN_PREBUILT_PACKS=str(folder))
    assert "libflash_dmattn_cu13_sm90.so is absent" in said(done)


def test_folder_without_manifest_is_refused(tmp_path: Path) -> None:
    done = cmake(tmp_path / "build", FLASH_DMATTN_PREBUILT_PACKS=str(tmp_path))
    assert f"has {tmp_path}, which has no manifest.json" in said(done)


def test_pack_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    folders = [pack_folder(tmp_path / name, "cu13-sm90") for name in ("a", "b")]
    done = cmake(tmp_path / "build", FLASH_DMATTN_PREBUILT_PACKS=";".join(map(str, folders)))
    assert "the pack cu13-sm90 is there twice" in said(done)


# --- other options


@pytest.mark.parametrize("value", ["main", "abc dirty", "-dirty"])
def test_commit_must_look_like_one(value: str, tmp_path: Path) -> None:
    done = cmake(tmp_path / "build", FLASH_DMATTN_COMMIT=value)
    assert f'FLASH_DMATTN_COMMIT is "{value}", which is no commit' in said(done)


def test_jobs_are_limited_by_the_variable(tmp_path: Path) -> None:
    assert cmake(tmp_path / "build", variables={"MAX_JOBS": "3"}).returncode == 0
    rules = (tmp_path / "build" / "CMakeFiles" / "rules.ninja").read_text()
    assert "pool fdm_jobs\n  depth = 3\n" in rules


def test_cuda_jobs_are_limited_by_memory(tmp_path: Path) -> None:
    assert cmake(tmp_path / "build").returncode == 0
    rules = (tmp_path / "build" / "CMakeFiles" / "rules.ninja").read_text()
    (depth,) = re.findall(r"pool fdm_cuda_jobs\n  depth = (\d+)\n", rules)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    pools = (ROOT / "cmake" / "JobPools.cmake").read_text()
    (each,) = re.findall(r"^set\(FDM_NVCC_JOB_MIB (\d+)\)$", pools, re.MULTILINE)
    assert 1 <= int(depth) <= max(1, memory // int(each))


@pytest.mark.parametrize("value", ["0", "-1", "all"])
def test_wrong_number_of_jobs_is_refused(value: str, tmp_path: Path) -> None:
    done = cmake(tmp_path / "build", variables={"MAX_JOBS": value})
    assert f'MAX_JOBS is "{value}"; it must be a positive number' in said(done)


def test_configuring_needs_no_network(tmp_path: Path) -> None:
    cut_off = ["unshare", "--map-root-user", "--net"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*cut_off, "true"], check=False).returncode
    ):
        pytest.skip("no user namespaces here; scripts/check_sdist builds without a network")
    flags = [f"-D{name}={value}" for name, value in NOTHING.items()]
    flags += [
        "-DFLASH_DMATTN_CPU=ON",
        "-DFLASH_DMATTN_CORE=ON",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    if subprocess.run(
        [sys.executable, "-m", "nanobind"], capture_output=True, check=False
    ).returncode:
        pytest.skip("no nanobind")
    done = subprocess.run(
        [*cut_off, "cmake", "-S", ROOT, "-B", tmp_path / "build", "-G", "Ninja", *flags],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# --- requirements of a wheel


@pytest.mark.parametrize(
    ("variables", "required", "tag"),
    [
        ({}, [], f"cp3{sys.version_info.minor}-cp3{sys.version_info.minor}"),
        ({"FDM_NANOBIND": "shared"}, ["nanobind-backend>=1.0"], "cp310-abi3"),
    ],
)
def test_what_a_wheel_requires(
    variables: dict[str, str], required: list[str], tag: str, tmp_path: Path
) -> None:
    """A build from source requires nothing: nanobind-backend is not available everywhere."""
    script = "import sys; from scikit_build_core import build as b; " + (
        "print(b.prepare_metadata_for_build_wheel(sys.argv[1]))"
    )
    environment = {key: text for key, text in os.environ.items() if key != "FDM_NANOBIND"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=ROOT,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "deprecated" not in done.stdout + done.stderr
    folder = tmp_path / done.stdout.splitlines()[-1]
    found = re.findall(r"^Requires-Dist: (.*)$", (folder / "METADATA").read_text(), re.MULTILINE)
    assert [text for text in found if "extra ==" not in text] == required
    assert f"Tag: {tag}-" in (folder / "WHEEL").read_text()


def test_wheels_of_a_release_share_what_all_pythons_have() -> None:
    assert '{"FDM_NANOBIND": "shared"}' in (ROOT / "release" / "wheel.py").read_text()
    assert "FDM_NANOBIND=shared scripts/timed" in (ROOT / "scripts" / "test").read_text()
    subset = (ROOT / "release" / "cibuildwheel.toml").read_text()
    assert 'environment = { FDM_NANOBIND = "shared" }' in subset


# --- equal sources give equal files


def two_trees(folder: Path) -> list[Path]:
    """Copy the build's inputs to two folders whose paths differ in length."""
    trees = [folder / "a", folder / "another" / "place"]
    for tree in trees:
        for name in ("cmake", "cpp"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("CMakeLists.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, tree / name)
    return trees


@pytest.mark.slow
def test_cpu_pack_does_not_depend_on_the_folder(tmp_path: Path) -> None:
    digests = []
    for tree in two_trees(tmp_path):
        # Every optimization level embeds paths; the lowest compiles fastest.
        done = cmake(tree / "build", tree, FLASH_DMATTN_CPU="ON", CMAKE_CXX_FLAGS_RELEASE="-O0")
        assert done.returncode == 0, done.stderr
        subprocess.run(["cmake", "--build", tree / "build"], check=True, capture_output=True)
        (row,) = install(tree / "build", tree / "out")["packs"]
        digests.append(row["sha256"])
    assert digests[0] == digests[1]


def symbols_of_cpu_object(build: Path, **options: str) -> set[str]:
    """Compile one source of the cpu pack and return the symbols that its object has or needs."""
    done = cmake(build, FLASH_DMATTN_CPU="ON", **options)
    assert done.returncode == 0, done.stderr
    name = "CMakeFiles/flash_dmattn_cpu_common.dir/cpp/cpu/pack.cpp.o"
    subprocess.run(["ninja", "-C", build, name], check=True, capture_output=True)
    with (build / name).open("rb") as stream:
        table = ELFFile(stream).get_section_by_name(".symtab")
        return {symbol.name for symbol in table.iter_symbols()}


@pytest.mark.skipif(sys.platform != "linux", reason="the symbols are those of Linux")
@pytest.mark.parametrize(
    ("flags", "checked"),
    [("", {"__snprintf_chk"}), ("-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=0", set())],
)
def test_objects_are_hardened(flags: str, checked: set[str], tmp_path: Path) -> None:
    """A _FORTIFY_SOURCE level in the builder's flags is kept."""
    names = symbols_of_cpu_object(tmp_path, CMAKE_CXX_FLAGS=flags)
    assert {n for n in names if n.endswith("_chk")} == checked
    assert "__stack_chk_fail" in names


@pytest.mark.skipif(sys.platform != "linux", reason="the symbols are those of Linux")
def test_objects_check_themselves(tmp_path: Path) -> None:
    names = symbols_of_cpu_object(tmp_path, FLASH_DMATTN_SANITIZE="ON", CMAKE_CXX_FLAGS="-O1")
    for prefix in ("__asan_report_load", "__ubsan_handle_"):
        assert any(name.startswith(prefix) for name in names), prefix
    assert all(name.endswith("_abort") for name in names if name.startswith("__ubsan_handle_"))


@pytest.mark.slow
def test_cuda_objects_do_not_depend_on_the_folder(tmp_path: Path) -> None:
    try:
        nvcc = find_nvcc(None)
    except ReleaseError as error:
        pytest.skip(str(error))
    contents = []
    for tree in two_trees(tmp_path):
        options = {"FLASH_DMATTN_CUDA": "ON", "FLASH_DMATTN_ARCHS": "80"}
        options |= {"FLASH_DMATTN_HEAD_DIMS": "64", "CMAKE_CUDA_COMPILER": str(nvcc)}
        done = cmake(tree / "build", tree, **options)
        assert done.returncode == 0, done.stderr
        listed = subprocess.run(
            ["ninja", "-C", tree / "build", "-t", "targets", "all"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        # One source has kernels in an unnamed namespace, the other only instantiates templates.
        names = [
            next(re.finditer(rf"^(\S*{part}\S*\.o):", listed, re.MULTILINE))[1]
            for part in ("select/keep", "kernels/row_bias")
        ]
        subprocess.run(["ninja", "-C", tree / "build", *names], check=True, capture_output=True)
        for name in names:  # nvcc's temporary file names, which the linked pack loses too
            subprocess.run(["strip", "--strip-unneeded", tree / "build" / name], check=True)
        contents.append([(tree / "build" / name).read_bytes() for name in names])
    assert contents[0] == contents[1]


# --- the commands


def fake_nvcc(folder: Path, version: str) -> Path:
    path = folder / "nvcc"
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.0'\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("13.0", "is of CUDA 13.0, not 12; name one with --nvcc"),
        ("12.1", "is of CUDA 12.1; 12.4 is the oldest that is supported"),
    ],
)
def test_packs_need_the_right_nvcc(
    version: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nvcc = fake_nvcc(tmp_path, version)
    options = ["--cuda", "12", "--output", str(tmp_path / "o"), "--nvcc", str(nvcc)]
    assert main(["packs", *options]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("excess", [0, 1])
def test_a_pack_has_a_budget_where_it_is_built(
    excess: int,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = targets.load().cuda_of("13").packs["sm90"] * 10**6
    row = {"name": "cu13-sm90", "cuda": "13.1", "arch": "sm90", "size": limit + excess * 10**6}
    (tmp_path / "manifest.json").write_text(json.dumps({"packs": [row]}))
    cmake = tmp_path / "cmake"
    cmake.write_text(
        "#!/bin/sh\n"
        "while [ $# -gt 1 ]; do if [ $1 = --prefix ]; then packs=$2/flash_dmattn/packs;"
        f" mkdir -p $packs && cp {tmp_path}/manifest.json $packs; fi; shift; done\n"
    )
    cmake.chmod(0o755)
    monkeypatch.setenv("CMAKE", str(cmake))
    nvcc = fake_nvcc(tmp_path, "13.1")
    options = ["--cuda", "13", "--output", str(tmp_path / "o"), "--nvcc", str(nvcc)]
    assert main(["packs", *options]) == excess
    written = capfd.readouterr().err
    assert f"cu13-sm90: {limit / 10**6 + excess:.2f} MB" in written
    wrong = f"cu13-sm90 has {limit / 10**6 + 1:.1f} MB; at most {limit // 10**6} are allowed"
    assert (wrong in written) is bool(excess)


def test_assembling_needs_a_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wheel", "--packs", str(tmp_path), "--output", str(tmp_path / "dist")]) == 1
    assert f"{tmp_path} has no manifest.json" in capsys.readouterr().err


def test_sdist_holds_every_file(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core")
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    build = "import scikit_build_core.build as b, sys; print(b.build_sdist(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, tmp_path], cwd=ROOT, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        packed = {name.partition("/")[2] for name in opened.getnames()} - {""}
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    kept_out = {".gitignore"}
    assert {name for name in listed if name not in packed and (ROOT / name).exists()} <= kept_out
    assert packed <= set(listed) | {"PKG-INFO"}, "something that is no source"


def test_small_wheel_is_what_the_build_describes(wheel: SmallWheel) -> None:
    """The tests' manifest row has the fields of a real one."""
    (path,) = [
        Path(folder) / "packs" / "manifest.json"
        for folder in __import__("flash_dmattn").__path__
        if (Path(folder) / "packs" / "manifest.json").is_file()
    ]
    for row in json.loads(path.read_text())["packs"]:
        assert set(row) == set(wheel.packs[0]) | {"sha256", "size"}
