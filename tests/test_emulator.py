# SPDX-License-Identifier: BSD-3-Clause
"""The emulator of CUDA kernels (cpp/emulator) must detect the defects of kernels."""

from __future__ import annotations

import pytest

from emulated import ROOT, compiled, output

SEEDS = ["0", "1", "2"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    return compiled("kernels", tmp_path_factory.mktemp("emulator"))


@pytest.mark.parametrize("seed", SEEDS)
def test_what_kernels_do_wrong_is_seen(program: str, seed: str) -> None:
    lines = output([program], FDM_EMULATOR_SEED=seed).splitlines()
    results = dict(line.split(": ", 1) for line in lines)
    assert results.pop("barriers for ever").endswith(
        "the threads of a block wait for each other for ever: 64 threads left, 64 at barriers in "
        "shared memory, 0 at barriers of the block, 0 at their warp's"
    )
    assert results.pop("no cluster").startswith("0 0 the block is in no cluster (block 0, 0, ")
    assert results.pop("asks in two places").startswith(
        "0 0 threads of a block call __syncthreads() in different places (block 0, 0, "
    )
    assert results == {
        "asks": "1 1 done",
        "boxes of a new thread": "1 0 done",
        "meetings": "239 75 done",
        "copies": "4 404 done",
        "copies too early": "1 1 done",
        "barriers": "1 1 done",
        "clusters": "6000 6400 done",
        "exchange": "1000 1050 done",
        "releases early": "1 0 done",
        "beyond": "0 0 a block has written beyond its shared memory",
        "products": "16 16 done",
        "products too early": "0 0 done",
    }


def test_the_emulator_has_all_headers_of_assembly() -> None:
    names = [
        {path.name for path in (ROOT / "cpp" / folder / "ptx").iterdir()}
        for folder in ("cuda", "emulator")
    ]
    assert names[0] == names[1]
