# SPDX-License-Identifier: BSD-3-Clause
"""The numbering of the CUDA kernels' thread blocks: each part of the work once.

Heads and sequences form groups at sizes that test calls rarely have. The functions that number
blocks run here by themselves, for drawn sizes and any groups, and for the routes of problems with
up to 10,000 sequences x heads.
"""

from __future__ import annotations

import sys
from pathlib import Path

from emulated import ROOT, compiled, output


def test_each_part_of_the_work_has_one_number(tmp_path: Path) -> None:
    generator = ROOT / "cmake" / "generate_kernels.py"
    output([sys.executable, str(generator), "--output", str(tmp_path)])
    arch = ["-DFDM_ARCH=90", "-DFDM_TILE_ARCH=90", "-D__CUDA_ARCH__=900"]
    folders = [f"-I{ROOT / 'cpp' / 'cuda'}", f"-I{tmp_path}"]
    routes = map(str, (ROOT / "cpp" / "cuda" / "route").glob("*.cpp"))
    program = compiled("numbering", tmp_path, *arch, *folders, "-fno-strict-aliasing", *routes)
    assert dict(line.split(": ") for line in output([program]).splitlines()) == dict.fromkeys(
        [
            "tiles of batches",
            "tiles of packed sequences",
            "blocks of keys",
            "blocks of segments",
            "blocks of packed segments",
            "heads of a query",
            "tiles in parts",
            "pair bias forward for sm90, rows",
            "pair bias forward for sm90, mask",
            "pair bias forward for sm90, heads",
            "pair bias forward for sm90, keys",
            "sources of tiles",
            "sources of clusters",
            "steps of dbias",
            "rows of no sequence",
            "routes of forward",
            "routes of backward",
            "sums of segments",
            "sums of packed segments",
            "routes of pair biases",
            "routes of lists",
            "routes of packed lists",
            "passes of lists",
            "workspaces of lists",
        ],
        "each part has one number",
    )
