# SPDX-License-Identifier: BSD-3-Clause
"""Other files agree with the facts of cmake/targets.json, and the generated files are right."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from pathlib import Path

import pytest

from docs_tools.blocks import MarkerError
from release import matrix, tables, targets
from release.__main__ import main
from release.project import ROOT, ReleaseError

TABLE = targets.load()


# --- the table itself


def test_cuda_rows_make_sense() -> None:
    for cuda in TABLE.cuda:
        assert cuda.toolkit.split(".")[0] == cuda.min_toolkit.split(".")[0] == cuda.major
        assert re.fullmatch(r"\d+\.\d+\.\d+", cuda.min_driver)


def test_oldest_toolkit_compiles_every_required_arch() -> None:
    for cuda in TABLE.cuda:
        able = {arch.name for arch in TABLE.archs_of(cuda.min_toolkit)}
        assert {arch.name for arch in TABLE.archs if arch.required} <= able


def test_archs_of_a_toolkit() -> None:
    assert [a.name for a in TABLE.archs_of("12.4")] == ["sm80", "sm86", "sm89", "sm90"]
    assert [a.name for a in TABLE.archs_of("12.9")][-2:] == ["sm100", "sm120"]
    assert [a.name for a in TABLE.archs_of("13.0")][-3:] == ["sm100", "sm110", "sm120"]
    assert [a.name for a in TABLE.archs_of("13.0", "x86_64")][-2:] == ["sm100", "sm120"]
    assert TABLE.archs_of("13.0", "aarch64") == TABLE.archs_of("13.0")
    assert TABLE.archs_of("11.0") == ()


def test_a_newer_arch_needs_a_newer_driver() -> None:
    """An arch that CUDA 12's oldest drivers do not know raises the pack's minimum driver."""
    twelve, thirteen = TABLE.cuda
    for arch in TABLE.archs:
        assert set(arch.machines) <= {row.machine for row in TABLE.platforms}
        newer = arch in TABLE.archs_of("12.9") and arch not in TABLE.archs_of("12.4")
        assert (TABLE.min_driver(arch, twelve) > twelve.min_driver) is (
            newer or arch.name == "sm110"
        )
        assert TABLE.min_driver(arch, thirteen) == thirteen.min_driver
    twelve_with_all = dataclasses.replace(twelve, packs=thirteen.packs)
    with_all = dataclasses.replace(TABLE, cuda=(twelve_with_all, thirteen))
    for table, built_with in (
        (with_all, "12 (575.51.03), 13 (580.65.06)"),
        (TABLE, "13 (580.65.06)"),
    ):
        rows = tables.support_table(table).splitlines()
        (row,) = [row for row in rows if row.startswith("| 12.0 ")]
        assert f"| {built_with} |" in row


# --- files that repeat it


def test_nothing_derived_has_drifted() -> None:
    assert main(["tables"]) == 0


def test_cmake_reads_the_same_archs() -> None:
    for cuda in TABLE.cuda:
        command = ["cmake", "-DARCHS=all", f"-DNVCC_VERSION={cuda.toolkit}", "-P"]
        script = ROOT / "cmake" / "print_cuda_archs.cmake"
        done = subprocess.run([*command, script], capture_output=True, text=True, check=True)
        (archs,) = re.findall(r"^archs: (.*)$", done.stderr, re.MULTILINE)
        assert archs.split() == [arch.name for arch in TABLE.archs_of(cuda.toolkit)]
        assert cuda.packs.keys() <= set(archs.split())
    assert {name for cuda in TABLE.cuda for name in cuda.packs} == {a.name for a in TABLE.archs}


def test_loader_accepts_the_majors_and_archs() -> None:
    from flash_dmattn.loader.environment import ENVIRONMENT

    assert ENVIRONMENT["FLASH_DMATTN_CUDA"].values == tuple(cuda.major for cuda in TABLE.cuda)
    archs = tuple(arch.name.removeprefix("sm") for arch in TABLE.archs)
    assert ENVIRONMENT["FLASH_DMATTN_ARCH"].values == archs


def changed(**changes: object) -> targets.Table:
    return dataclasses.replace(TABLE, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (changed(pythons=("3.11",)), "pyproject.toml asks for Python 3.10"),
        (changed(torch_python="3.13"), "pyproject.toml has classifiers of Python 3.10"),
        (
            changed(pythons=TABLE.pythons[:-1]),
            "cibuildwheel.toml does not build cp3{10,11,12,13,14}-",
        ),
        (changed(free_threaded="3.16"), "does not build cp316t from Python 3.16 on"),
        (changed(min_torch="2.9"), "does not ask for torch>=2.9"),
        (
            changed(cuda=(dataclasses.replace(TABLE.cuda[0], min_toolkit="12.99"),)),
            "min_toolkit is newer",
        ),
        (
            changed(cuda=(dataclasses.replace(TABLE.cuda[0], toolkit="12.8"),)),
            "the image is not of toolkit 12.8",
        ),
    ],
)
def test_disagreement_is_found(table: targets.Table, message: str) -> None:
    assert any(message in problem for problem in tables.disagreements(table))


def test_present_table_agrees_with_the_rest() -> None:
    assert list(tables.disagreements(TABLE)) == []


# --- blocks of pages


def test_block_is_renewed_and_the_rest_kept() -> None:
    page = "# Title\n\n<!-- support-table -->\nstale text\n<!-- end support-table -->\n\nText.\n"
    filled = tables.fill_blocks(page, TABLE)
    assert filled.startswith("# Title\n\n<!-- support-table -->\n| compute capability |")
    assert filled.endswith("|\n<!-- end support-table -->\n\nText.\n")
    assert "stale" not in filled
    assert tables.fill_blocks(filled, TABLE) == filled


def test_other_blocks_are_left_alone() -> None:
    page = "<!-- variables -->\nold\n<!-- end variables -->\n"
    assert tables.fill_blocks(page, TABLE) == page


def test_block_without_end_is_an_error() -> None:
    with pytest.raises(MarkerError, match="no <!-- end platform-table -->"):
        tables.fill_blocks("<!-- platform-table -->\n", TABLE)


def test_drifted_page_is_found(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "supported.md"
    page.parent.mkdir()
    page.write_text("<!-- support-table -->\n<!-- end support-table -->\n")
    files = dict(tables.derived_files(TABLE, tmp_path))
    assert files[page] != page.read_text()
    assert set(files) == {page, tmp_path / "conda" / "variants.yaml"}


def test_support_table_has_every_capability() -> None:
    rows = tables.support_table(TABLE).splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == [f"| {cc}" for cc in TABLE.preference]
    (row,) = [row for row in rows if row.startswith("| 8.9")]
    assert "sm89, sm86, sm80" in row
    for cuda in TABLE.cuda:
        assert f"{cuda.major} ({cuda.min_driver})" in row


def test_support_table_says_what_was_run() -> None:
    rows = tables.support_table(TABLE).splitlines()
    assert set(TABLE.record) == set(TABLE.preference)
    assert set(TABLE.record.values()) <= set(tables.RECORDS)
    for capability, record in TABLE.record.items():
        (row,) = [row for row in rows if row.startswith(f"| {capability} |")]
        assert row.endswith(f"| {tables.RECORDS[record]} |")


def test_every_pack_of_the_wheel_was_measured() -> None:
    measured = json.loads(tables.MEASURED.read_text())
    machine = measured["wheel"]["machine"]
    released = {f"cu{c.major}-{a.name}" for c in TABLE.cuda for a in TABLE.released(c, machine)}
    assert released <= measured["packs"].keys()
    sizes = [(name, pack["bytes"]) for name, pack in measured["packs"].items()]
    for name, size in sizes:
        cuda, _, arch = name.partition("-")
        pack = {"name": name, "cuda": f"{cuda.removeprefix('cu')}.0", "arch": arch, "size": size}
        assert TABLE.oversize(pack) == ""
    wheel = measured["wheel"]
    assert wheel["bytes"] < TABLE.wheel.max_wheel_mb * 10**6
    assert set(wheel["parts"]) == {"base", *(f"cu{cuda.major}" for cuda in TABLE.cuda)}


def test_tables_of_packs_tell_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = {"bytes": 12_340_000, "cpu_seconds": 900, "kernels": 150, "spilling": 2}
    one |= {"spill_bytes": 64, "compiler_mb": 200, "disk_mb": 40}
    released = [f"cu{c.major}-{arch.name}" for c in TABLE.cuda for arch in TABLE.released(c)]
    packs = dict.fromkeys(released, one) | {"cu13-sm90": one | {"compiler_mb": 210}}
    del packs["cu13-sm110"]
    parts = {"cu12": 41_000_000, "cu13": 38_000_000, "base": 1_000_000}
    wheel = {"machine": "x86_64", "bytes": 80_000_000, "parts": parts}
    record = tmp_path / "measured.json"
    record.write_text(json.dumps({"packs": packs, "wheel": wheel}))
    monkeypatch.setattr(tables, "MEASURED", record)
    rows = {row.split(" | ")[0]: row for row in tables.pack_table(TABLE).splitlines()[2:]}
    assert list(rows) == [f"| {name}" for name in released]
    assert "| 12.3 | 15 | 2 of 150, 64 bytes | yes, all tests |" in rows["| cu13-sm90"]
    assert rows["| cu13-sm110"].count("not measured") == 3
    twelve, thirteen, rest, whole = tables.wheel_table(TABLE).splitlines()[2:]
    assert twelve == "| 4 packs of CUDA 12 | 41.0 | 60 | 200 MB | 160 MB |"
    # The sm110 pack is for another machine, so it is not counted.
    assert thirteen == "| 6 packs of CUDA 13 | 38.0 | 90 | 210 MB | 240 MB |"
    assert rest.startswith("| the rest | 1.0 |")
    assert whole.startswith(f"| the wheel | 80.0, at most {TABLE.wheel.max_wheel_mb} |")


def test_platform_table_says_of_each_what_was_seen() -> None:
    text = tables.platform_table(TABLE)
    for row in (*TABLE.platforms, *TABLE.cpu_platforms):
        assert f"| {row.seen} |" in text
    assert "macosx_11_0_arm64` | macOS 11.0 or newer |" in text
    page = re.sub(r"\s+", " ", (ROOT / "docs" / "supported.md").read_text())
    assert f"Every platform needs PyTorch {TABLE.min_torch} or newer." in page
    assert f"On Python {TABLE.pythons[-1]} the CPU pack was tried without PyTorch." in page


def test_every_option_is_told() -> None:
    told = tables.build_options(TABLE)
    declared = re.findall(
        r"(?:set|option)\((FLASH_DMATTN_\w+)", (ROOT / "cmake" / "Options.cmake").read_text()
    )
    assert len(declared) >= 8
    for option in declared:
        (row,) = [row for row in told.splitlines() if row.startswith(f"| `{option}`")]
        assert len(row.split(" | ")[2]) > 20


# --- the matrix


def test_matrix_covers_the_table() -> None:
    jobs = matrix.jobs(TABLE)
    pairs = {(job["cuda"], job["machine"]) for job in jobs["packs"]}
    assert pairs == {(c.major, p.machine) for c in TABLE.cuda for p in TABLE.platforms}
    for job in jobs["packs"]:
        released = TABLE.released(TABLE.cuda_of(job["cuda"]), job["machine"])
        assert job["archs"].split() == [arch.name for arch in released]
        assert {arch.name for arch in TABLE.archs if arch.required} <= set(job["archs"].split())
        assert job["machine"] in job["image"]
        assert job["head_dims"] == ""
    assert {job["python"] for job in jobs["tests"]} == set(TABLE.torch_pythons)
    assert TABLE.torch_pythons[-1] == TABLE.torch_python
    assert [job["artifact"] for job in jobs["wheels"]] == ["wheel-x86_64", "wheel-aarch64"]
    assert [job["machine"] for job in jobs["cpu_wheels"]] == ["macos-arm64", "windows-x86_64"]
    for job in jobs["cpu_wheels"]:
        assert {row["artifact"] for row in jobs["tests"] if row["machine"] == job["machine"]} == {
            job["artifact"]
        }
    for job in jobs["tests"]:
        assert all((ROOT / path).is_file() for path in job["tests"].split())
    kinds = ("packs", "wheels", "cpu_wheels")
    names = [job["artifact"] for kind in kinds for job in jobs[kind]]
    assert len(set(names)) == len(names)


def test_small_matrix_is_a_part_of_the_table() -> None:
    jobs = matrix.jobs(TABLE, small=True)
    (packs,) = jobs["packs"]
    assert packs["cuda"] == TABLE.cuda[-1].major
    assert packs["archs"] in {arch.name for arch in TABLE.archs}
    assert {int(dim) for dim in packs["head_dims"].split()} <= set(TABLE.head_dims)
    pythons = [job["python"] for job in jobs["tests"] if job["machine"] == packs["machine"]]
    assert pythons == [TABLE.pythons[0], TABLE.torch_python]


def test_a_matrix_of_named_machines_has_no_other_system() -> None:
    jobs = matrix.jobs(TABLE, ["x86_64"])
    assert jobs["cpu_wheels"] == []
    assert {job["machine"] for job in jobs["tests"]} == {"x86_64"}


def test_unknown_machine_is_refused() -> None:
    with pytest.raises(ReleaseError, match="no machine riscv64"):
        matrix.jobs(TABLE, ["riscv64"])
