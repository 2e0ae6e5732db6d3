# SPDX-License-Identifier: BSD-3-Clause
"""Rewrites the table of known routes; library.py explains how to call it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from .library import ARCHS, HEAD_DIMS, PASSES, Routes, Spec, known_routes, table_path

# The problems to draw for constants with these prefixes, numbered as Focus of routes.cpp.
FOCUS = {
    1: ("direct", "cluster", "decode", "keep"),
    2: ("segment", "consecutive", "list", "plan", "select", "clear", "few_columns"),
    3: ("pair_bias", "dbias", "share_", "half", "small_tile", "live", "fused", "per_query"),
    4: (
        "small",
        "chain",
        "short",
        "min_",
        "split",
        "max_",
        "ticket",
        "heads_inside",
    ),
}
DRAWS = 40_000
# A lower value of these changes no route: one split means no split.
ONE_SIDED = ("min_splits",)


def problem(
    batch: int, heads: int, kv_heads: int, head_dim: int, queries: int, keys: int, **others: int
) -> Spec:
    """Return a problem on an H100."""
    names = ("batch", "heads", "kv_heads", "head_dim", "queries", "keys")
    sizes = (batch, heads, kv_heads, head_dim, queries, keys)
    return Spec(sms=132, **dict(zip(names, sizes, strict=True)), **others)


KEPT = {"causal": 1, "mask": 2, "mask_heads": 1, "mask_batch": 1}
KEY_BIAS = {"bias": 1, "bias_heads": 1, "bias_batch": 1}
ONE_TOKEN = {"causal": 1, "forward_only": 1}
EVERYDAY = {
    "training, GPT": problem(32, 12, 12, 64, 1024, 1024, causal=1),
    "training, BERT": problem(64, 12, 12, 64, 256, 256),
    "training, many short sequences": problem(512, 8, 8, 64, 256, 256, causal=1),
    "training, kept keys": problem(1, 32, 8, 128, 8192, 8192, max_kept=1024, **KEPT, **KEY_BIAS),
    "training, few kept keys": problem(8, 16, 4, 64, 512, 512, max_kept=128, **KEPT, **KEY_BIAS),
    "training, packed": problem(
        64, 32, 8, 128, 1024, 1024, max_kept=512, rows=16384, total_keys=16384, **KEPT
    ),
    "training, packed, more tiles than kernels number": problem(
        2_105_371, 1023, 1023, 64, 64, 64, rows=4096, total_keys=4096
    ),
    "training, forgetting": problem(
        1,
        16,
        4,
        128,
        16384,
        16384,
        causal=1,
        mask=2,
        mask_heads=2,
        mask_batch=1,
        keeps_runs=1,
        bias=1,
        bias_heads=2,
        bias_batch=1,
        float32=1,
    ),
    "training, a mask for each query": problem(
        1, 8, 8, 128, 16384, 16384, mask=3, mask_heads=1, mask_batch=1
    ),
    "training, a mask of blocks": problem(
        1, 8, 8, 128, 16384, 16384, mask=3, mask_heads=1, mask_batch=1, blocks=1
    ),
    "training, narrow values": problem(1, 16, 16, 192, 4096, 4096, causal=1, value_dim=128),
    "training, kept keys, narrow values": problem(
        1, 32, 8, 192, 8192, 8192, max_kept=1024, value_dim=128, **KEPT, **KEY_BIAS
    ),
    "training, heads of 256": problem(2, 8, 4, 256, 4096, 4096, causal=1),
    "pair bias, triangles": problem(
        256, 4, 4, 32, 256, 256, bias=2, bias_heads=2, mask=1, mask_batch=1
    ),
    "pair bias, windows": problem(512, 8, 8, 32, 64, 64, bias=2, bias_heads=2),
    "pair bias and mask, long": problem(
        1, 16, 16, 64, 4096, 4096, bias=2, bias_heads=2, bias_batch=1, mask=3, causal=1
    ),
    "generation": problem(8, 32, 8, 128, 1, 4096, **ONE_TOKEN),
    "generation with a mask": problem(
        1, 32, 8, 128, 1, 65536, mask=1, mask_heads=1, mask_batch=1, **ONE_TOKEN, **KEY_BIAS
    ),
    "generation, pages": problem(
        16, 32, 8, 128, 1, 4096, rows=16, total_keys=65536, page=256, **ONE_TOKEN
    ),
    "a prompt": problem(1, 32, 8, 128, 32768, 32768, **ONE_TOKEN),
    "forgetting, float64": problem(
        1,
        16,
        4,
        64,
        16384,
        16384,
        causal=1,
        mask=2,
        mask_heads=1,
        keeps_runs=1,
        bias=1,
        bias_heads=1,
        float64=1,
    ),
    "forgetting, float64, one token": problem(
        8, 16, 4, 64, 1, 16384, bias=1, bias_heads=1, bias_batch=1, float64=1, **ONE_TOKEN
    ),
    "one query whose rows are not aligned": problem(4, 8, 8, 60, 1, 512, **ONE_TOKEN),
    "equal bits": problem(4, 16, 16, 128, 2048, 2048, causal=1, deterministic=1),
}


def focus_of(constant: str) -> int:
    """Return the kind of problems to draw for a constant."""
    return next((n for n, names in FOCUS.items() if constant.startswith(names)), 0)


def other_values(constant: str, value: int, sign: int) -> list[int]:
    """Return values on one side of a constant, nearest first."""
    if sign > 0 and constant.endswith("head_dim"):
        return [min((dim for dim in HEAD_DIMS if dim > value), default=512)]
    return [value + sign * step for step in (1, max(1, value // 8), value // 2)]


def both_sides(routes: Routes, arch: int) -> list[dict[str, Any]]:
    """Return problems whose routes change if a constant is lower, and if it is higher.

    Problems of the current table are kept if they still qualify.
    """
    lines = []
    known = {
        (line["constant"], line["other"]): (line["pass"], Spec(**line["problem"]))
        for line in known_routes(arch)
        if "constant" in line
    }
    for constant, value in routes.table(arch).items():
        if value <= 1:
            continue
        for sign in (-1, 1):
            if sign < 0 and constant in ONE_SIDED:
                continue
            found = None
            for other in other_values(constant, value, sign):
                found = known.get((constant, other))
                if found and not changes(routes, arch, *found, constant, other):
                    found = None
                for focus in dict.fromkeys((focus_of(constant), 0)):
                    found = found or routes.find_change(arch, constant, other, focus, DRAWS)
                if found:
                    lines.append(
                        line(routes, arch, *found, constant=constant, value=value, other=other)
                    )
                    break
            if not found:
                raise SystemExit(
                    f"sm{arch}: no problem's route changes if {constant} is not {value}"
                )
    return lines


def changes(routes: Routes, arch: int, of: str, spec: Spec, constant: str, other: int) -> bool:
    """Return whether another value of a constant changes the route of a pass."""
    changed = routes.route(arch, spec, of, **{constant: other})
    return changed != routes.route(arch, spec, of)


def line(routes: Routes, arch: int, of: str, spec: Spec, **beginning: Any) -> dict[str, Any]:
    """Return a line of the table."""
    known = {**beginning, "pass": of, "problem": spec.values()}
    if of in ("forward", "backward"):
        known["way"] = routes.way(arch, spec, of)
    return {**known, "route": routes.route(arch, spec, of)}


def main() -> None:
    """Write the tables of all architectures."""
    with tempfile.TemporaryDirectory() as folder:
        routes = Routes.compiled(Path(folder))
        for arch in ARCHS:
            lines = [
                line(routes, arch, of, spec, name=name)
                for name, spec in EVERYDAY.items()
                if arch == 90 or not spec.value_dim  # only sm_90 has kernels for narrow values
                for of in PASSES
                if routes.route(arch, spec, of)
            ]
            lines += both_sides(routes, arch)
            table_path(arch).write_text("".join(json.dumps(own) + "\n" for own in lines))


if __name__ == "__main__":
    main()
