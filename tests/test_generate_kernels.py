# SPDX-License-Identifier: BSD-3-Clause
"""The generated sources of the CUDA packs: each kernel once, no rewrite of unchanged files."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from release.programs import find_nvcc
from release.project import ReleaseError

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "cmake" / "generate_kernels.py"
TARGETS: dict[str, Any] = json.loads((ROOT / "cmake" / "targets.json").read_text())
INSTANTIATION = re.compile(r"^template cudaError_t fdm::cuda::launch_(\w+)<(\w+), (\d+)>", re.M)


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import generate_kernels

    return generate_kernels


def run(output: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--output", str(output), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def generate(output: Path, *arguments: str) -> list[Path]:
    """Run the generator and return the sources that it lists."""
    done = run(output, *arguments)
    assert done.returncode == 0, done.stderr
    return [Path(path) for path in done.stdout.strip().split(";")]


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def instantiated_head_dims(folder: Path) -> list[int]:
    found = re.search(
        r"InstantiatedHeadDims = HeadDims<(.*)>;", (folder / "head_dims.h").read_text()
    )
    assert found
    return [int(dim) for dim in found[1].split(", ")]


def test_every_kernel_is_instantiated_once(generator: ModuleType, tmp_path: Path) -> None:
    sources = generate(tmp_path)
    found = Counter(
        kernel for path in sources for kernel in INSTANTIATION.findall(path.read_text())
    )
    elements = [generator.ELEMENTS[dtype] for dtype in TARGETS["dtypes"]]
    names = [family.name for family in generator.FAMILIES]
    assert len(set(names)) == len(names), "a family is listed twice"
    wanted: Counter[tuple[str, str, str]] = Counter()
    for family in generator.FAMILIES:
        dims = map(str, family.served(TARGETS["head_dims"]))
        wanted.update(itertools.product([family.name], elements, dims))
    assert found == wanted


def test_listed_files_are_the_written_ones(tmp_path: Path) -> None:
    sources = generate(tmp_path)
    assert len(set(sources)) == len(sources)
    assert set(sources) == set(tmp_path.glob("*.cu"))
    assert set(tmp_path.iterdir()) - set(sources) == {tmp_path / "head_dims.h"}


def test_families_name_headers_that_define_them(generator: ModuleType) -> None:
    for family in generator.FAMILIES:
        header = ROOT / "cpp" / "cuda" / family.header
        assert re.search(rf"\blaunch_{family.name}\(const {family.params} &", header.read_text())


def test_families_of_one_arch_compile_for_the_others(generator: ModuleType, tmp_path: Path) -> None:
    """On other archs they have no kernels, and their headers include nothing that kernels need."""
    try:
        nvcc = find_nvcc(None)
    except ReleaseError as error:
        pytest.skip(str(error))
    generate(tmp_path)
    most = str(generator.PAIR_BIAS_SM90_HEAD_DIMS[-1])
    dims = generator.PAIR_BIAS_SM90_HEAD_DIMS
    names = [
        f.name for f in generator.FAMILIES if f.only_head_dims == dims and not f.serves_smaller
    ]
    assert len(names) == 2
    sources = [
        tmp_path / f"{name}_{dtype}_{most}.cu" for name in names for dtype in TARGETS["dtypes"]
    ]
    includes = [f"-I{folder}" for folder in (ROOT / "cpp", ROOT / "cpp" / "cuda", tmp_path)]
    target = ["-arch=sm_80", "-DFDM_ARCH=80", "-DFDM_TILE_ARCH=80"]
    for source in sources:
        command = [nvcc, "-std=c++17", "--cubin", *target, *includes, source, "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_head_dims_are_those_of_the_table(tmp_path: Path) -> None:
    generate(tmp_path)
    assert instantiated_head_dims(tmp_path) == TARGETS["head_dims"]
    largest = max(TARGETS["head_dims"])
    assert f"constexpr int kMaxHeadDim = {largest};" in (tmp_path / "head_dims.h").read_text()


def listed_head_dims(folder: Path, name: str) -> tuple[str, str]:
    """Return the list of the head dimensions of some families, and the largest."""
    header = (folder / "head_dims.h").read_text()
    found = re.search(
        rf"using {name}HeadDims = HeadDims<(.*)>;\nconstexpr int kMax{name}HeadDim = (\d+);", header
    )
    assert found
    return found[1], found[2]


def test_pair_bias_blocks_have_head_dims_of_their_own(
    generator: ModuleType, tmp_path: Path
) -> None:
    generate(tmp_path)
    dims = generator.PAIR_BIAS_HEAD_DIMS
    assert listed_head_dims(tmp_path, "PairBias") == (", ".join(map(str, dims)), str(dims[-1]))


@pytest.mark.parametrize(
    ("built", "rare", "pair_bias"),
    [
        ("32", "32", "32"),
        ("32;96", "96", "32, 96"),
        ("64;96", "64, 96", "64, 96"),
        ("32;64;192", "64, 192", "32, 64"),
        ("128;192;256", "128, 256", "128"),
    ],
)
def test_a_larger_tile_serves_rare_head_dims(
    built: str, rare: str, pair_bias: str, tmp_path: Path
) -> None:
    """Each head dimension has one, whichever dimensions are built."""
    generate(tmp_path, f"--head-dims={built}")
    assert listed_head_dims(tmp_path, "Rare") == (rare, rare.split(", ")[-1])
    assert listed_head_dims(tmp_path, "PairBias") == (pair_bias, pair_bias.split(", ")[-1])


def test_there_may_be_no_pair_bias_blocks(generator: ModuleType, tmp_path: Path) -> None:
    largest = max(TARGETS["head_dims"])
    assert largest > generator.MOST_PAIR_BIAS_HEAD_DIM
    sources = generate(tmp_path, f"--head-dims={largest}")
    assert not [path for path in sources if path.name.startswith("pair_bias")]
    assert listed_head_dims(tmp_path, "PairBias") == (str(largest), "0")


def test_output_is_deterministic(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    listed = [path.relative_to(first) for path in generate(first)]
    assert listed == [path.relative_to(second) for path in generate(second)]
    assert contents(first) == contents(second)


def test_unchanged_files_are_left_alone(tmp_path: Path) -> None:
    generate(tmp_path)
    stale, *kept = sorted(tmp_path.iterdir())
    long_ago = 1_000_000_000
    for path in (stale, *kept):
        os.utime(path, (long_ago, long_ago))
    right = stale.read_text()
    stale.write_text(right + "// changed\n")
    generate(tmp_path)
    assert {path.stat().st_mtime for path in kept} == {long_ago}
    assert stale.read_text() == right


@pytest.mark.parametrize("asked", ["128;64", "64,128", "64 128", "128;64;128"])
def test_subset_of_the_head_dims(asked: str, tmp_path: Path) -> None:
    sources = generate(tmp_path, f"--head-dims={asked}")
    dims = {match[2] for path in sources for match in INSTANTIATION.findall(path.read_text())}
    assert dims == {"64", "128"}
    assert instantiated_head_dims(tmp_path) == [64, 128]
    assert "constexpr int kMaxHeadDim = 128;" in (tmp_path / "head_dims.h").read_text()


def test_nothing_asked_means_all(tmp_path: Path) -> None:
    everything = [path.name for path in generate(tmp_path / "default")]
    assert [path.name for path in generate(tmp_path / "empty", "--head-dims=")] == everything


def test_unknown_head_dims_are_refused(tmp_path: Path) -> None:
    done = run(tmp_path / "kernels", "--head-dims=64;80;512")
    allowed = ", ".join(map(str, TARGETS["head_dims"]))
    assert done.returncode == 1
    assert done.stderr == f"FLASH_DMATTN_HEAD_DIMS has 80, 512; allowed: {allowed}\n"
    assert not (tmp_path / "kernels").exists()
