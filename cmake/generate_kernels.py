#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Writes the sources that instantiate the CUDA kernels, one small file each, into the build tree.

Each kernel family below is instantiated for head dimensions of cmake/targets.json and for both
dtypes. CMake runs this while it configures. It needs only the standard library. The output is
deterministic, and files with the right content stay untouched, so that they are not compiled again.
It prints the paths of the sources to compile, separated by semicolons.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = "// Made by cmake/generate_kernels.py from cmake/targets.json; do not edit.\n"
# The registers hold no larger heads: for these, the general kernels take a bias for each query.
# Heads of 96 columns use tiles of 128, since tiles of 96 take as much shared memory.
MOST_PAIR_BIAS_HEAD_DIM = 128
PAIR_BIAS_HEAD_DIMS = (32, 64, 128)
# For rare calls. The next larger tile serves the head dimensions between these.
RARE_HEAD_DIMS = (64, 128, 256)
# For the pair bias kernels of sm_90, whose shared memory holds no larger heads. Heads of 96 columns
# use tiles of 128.
PAIR_BIAS_SM90_HEAD_DIMS = (32, 64, 128)
# For the direct decode kernel (one query, few keys). Each warp holds its rows of K and V in
# registers.
DIRECT_HEAD_DIMS = (64, 128)
ELEMENTS = {"float16": "__half", "bfloat16": "__nv_bfloat16"}
# Headers of the element types; a family's header includes them only for archs with its kernels.
INCLUDES = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n\n"


@dataclass(frozen=True)
class Family:
    """A launch function template of <Element, kHeadDim>, and the header that defines it."""

    name: str
    header: str
    params: str
    most_head_dim: int = 256
    only_head_dims: tuple[int, ...] = ()  # empty: all up to the largest
    serves_smaller: bool = False  # adds the largest built, which serves all smaller ones

    def served(self, head_dims: list[int]) -> list[int]:
        """Return the built head dimensions for which the family has kernels."""
        built = [dim for dim in head_dims if dim <= self.most_head_dim]
        named = [dim for dim in built if not self.only_head_dims or dim in self.only_head_dims]
        return sorted({*named, *built[-1:]}) if self.serves_smaller else named

    def source(self, dtype: str, head_dim: int) -> str:
        """Return the file that instantiates one kernel."""
        return (
            f'{HEADER}{INCLUDES}#include "cuda/{self.header}"\n\n'
            f"template cudaError_t fdm::cuda::launch_{self.name}<{ELEMENTS[dtype]}, {head_dim}>("
            f"const fdm::cuda::{self.params} &, cudaStream_t);\n"
        )


def _pair_bias(name: str, header: str, params: str) -> Family:
    return Family(name, header, params, MOST_PAIR_BIAS_HEAD_DIM, PAIR_BIAS_HEAD_DIMS, True)


FAMILIES = (
    Family("decode", "forward/decode_launch.cuh", "ForwardLaunch"),
    Family(
        "direct_decode",
        "forward/direct_decode_launch.cuh",
        "DirectDecodeLaunch",
        only_head_dims=DIRECT_HEAD_DIMS,
    ),
    Family("forward", "forward/forward_launch.cuh", "ForwardLaunch"),
    Family("list_forward", "lists/forward_launch.cuh", "ListLaunch"),
    Family("list_backward", "lists/backward_launch.cuh", "ListBackwardLaunch"),
    Family("dq", "backward/dq_launch.cuh", "BackwardLaunch"),
    Family("dkdv", "backward/dkdv_launch.cuh", "BackwardLaunch"),
    Family(
        "row_bias",
        "backward/row_bias.cuh",
        "BackwardLaunch",
        only_head_dims=RARE_HEAD_DIMS,
        serves_smaller=True,
    ),
    _pair_bias("pair_bias_forward", "pair_bias/forward.cuh", "PairBiasForwardLaunch"),
    _pair_bias("pair_bias_dq", "pair_bias/dq.cuh", "PairBiasBackward"),
    _pair_bias("pair_bias_dkdv", "pair_bias/dkdv.cuh", "PairBiasBackward"),
    _pair_bias("pair_bias_dbias", "pair_bias/dbias.cuh", "PairBiasBackward"),
    Family(
        "pair_bias_forward_sm90",
        "pair_bias/sm90_forward_launch.cuh",
        "PairBiasForwardLaunch",
        only_head_dims=PAIR_BIAS_SM90_HEAD_DIMS,
    ),
    Family(
        "pair_bias_fused",
        "pair_bias/fused_launch.cuh",
        "PairBiasBackward",
        only_head_dims=PAIR_BIAS_SM90_HEAD_DIMS,
    ),
)


def list_head_dims(name: str, head_dims: list[int], family_name: str) -> str:
    """Declare the head dimensions of a family, and the largest: 0 if there are none."""
    family = next(family for family in FAMILIES if family.name == family_name)
    served = family.served(head_dims)
    listed = ", ".join(map(str, served or head_dims[:1]))
    return (
        f"using {name}HeadDims = HeadDims<{listed}>;\n"
        f"constexpr int kMax{name}HeadDim = {served[-1] if served else 0};\n"
    )


def head_dims_source(head_dims: list[int]) -> str:
    """Return the header that lists the instantiated head dimensions for the dispatch."""
    listed = ", ".join(map(str, head_dims))
    return (
        f"{HEADER}#pragma once\n\nnamespace fdm::cuda {{\n"
        "template <int... kDims> struct HeadDims {};\n"
        f"using InstantiatedHeadDims = HeadDims<{listed}>;\n"
        f"constexpr int kMaxHeadDim = {head_dims[-1]};\n"
        "// Of families that have not all of them. Where the largest is 0, there are none.\n"
        f"{list_head_dims('Rare', head_dims, 'row_bias')}"
        f"{list_head_dims('PairBias', head_dims, 'pair_bias_forward')}"
        f"{list_head_dims('PairBiasSm90', head_dims, 'pair_bias_forward_sm90')}"
        f"{list_head_dims('Direct', head_dims, 'direct_decode')}"
        "} // namespace fdm::cuda\n"
    )


def choose_head_dims(known: list[int], asked: str) -> list[int]:
    """Return the requested head dimensions in ascending order; all if none are requested."""
    chosen = sorted({int(dim) for dim in asked.replace(",", " ").replace(";", " ").split()})
    unknown = [dim for dim in chosen if dim not in known]
    if unknown:
        raise SystemExit(
            f"FLASH_DMATTN_HEAD_DIMS has {', '.join(map(str, unknown))}; allowed: "
            f"{', '.join(map(str, known))}"
        )
    return chosen or sorted(known)


def write(path: Path, content: str) -> None:
    """Write a file unless it has this content already."""
    if not path.exists() or path.read_text() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def main() -> None:
    """Parse the command line and write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument(
        "--head-dims", default="", help="head dimensions to instantiate; all by default"
    )
    options = parser.parse_args()
    table = json.loads((ROOT / "cmake" / "targets.json").read_text())
    head_dims = choose_head_dims(table["head_dims"], options.head_dims)
    write(options.output / "head_dims.h", head_dims_source(head_dims))
    sources = []
    for family in FAMILIES:
        for dtype in table["dtypes"]:
            for head_dim in family.served(head_dims):
                path = options.output / f"{family.name}_{dtype}_{head_dim}.cu"
                write(path, family.source(dtype, head_dim))
                sources.append(path.as_posix())
    print(";".join(sources))


if __name__ == "__main__":
    main()
