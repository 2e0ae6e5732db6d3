# SPDX-License-Identifier: BSD-3-Clause
"""The kernels of a call, the division of its work and its workspace, without a GPU.

The table of known routes is in tests/routes; tests/routes/library.py explains how to rewrite it.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from routes.__main__ import problem
from routes.library import ARCHS, CONSTANTS, ROOT, Routes, Spec, compiler, known_routes

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
INTERVALS = 2  # fdm_mask_kind


@pytest.fixture(scope="module")
def routes(tmp_path_factory: pytest.TempPathFactory) -> Routes:
    return Routes.compiled(tmp_path_factory.mktemp("routes"))


@pytest.mark.parametrize("arch", ARCHS)
def test_routes_are_the_known_ones(routes: Routes, arch: int) -> None:
    for known in known_routes(arch):
        spec = Spec(**known["problem"])
        assert routes.route(arch, spec, known["pass"]) == known["route"], known
        if "way" in known:
            assert routes.way(arch, spec, known["pass"]) == known["way"]


@pytest.mark.parametrize("arch", ARCHS)
def test_each_constant_has_known_problems_on_both_sides(routes: Routes, arch: int) -> None:
    sides: set[tuple[str, int]] = set()
    for known in known_routes(arch):
        if "constant" not in known:
            continue
        constant, other = known["constant"], known["other"]
        assert routes.table(arch)[constant] == known["value"], f"{constant} has changed"
        changed = routes.route(arch, Spec(**known["problem"]), known["pass"], **{constant: other})
        assert changed != known["route"], f"{constant} = {other} changes nothing"
        sides.add((constant, 1 if other > known["value"] else -1))
    # A constant of 0 or 1 marks a feature that the architecture lacks; one split means no split.
    used = [name for name, value in routes.table(arch).items() if value > 1]
    wanted = {(name, side) for name in used for side in (-1, 1)} - {("min_splits", -1)}
    assert sides == wanted


def test_each_constant_has_a_reason() -> None:
    """The reason names the table of a measurement, if there is one."""
    source = (ROOT / "cpp/cuda/route/tables.h").read_text()
    profiles = (ROOT / "benchmarks/profiles/README.md").read_text()
    tables = set(re.findall(r"^<!-- ([a-z0-9-]+) -->", profiles, re.MULTILINE))
    for name in CONSTANTS:
        reason = re.search(rf"((?:^  // .*\n)+)  int64_t {name} = ", source, re.MULTILINE)
        assert reason, f"{name} has no reason"
        measured = re.search(r" \[([a-z0-9-]+)\]\n$", reason[1])
        assert measured is None or measured[1] in tables, f"{name}: {reason[1]}"


@pytest.mark.parametrize("arch", ARCHS)
def test_a_workspace_has_room_on_every_device(routes: Routes, arch: int) -> None:
    for seed in range(1500):
        spec = routes.draw(arch, seed)
        for of in (1, 2):
            room = routes.library.workspace_room(arch, ctypes.byref(spec), of)
            for sms in (1, 16, 78, 108, 132, 144, 170, 256):
                spec.sms = sms
                used = routes.library.workspace_used(arch, ctypes.byref(spec), of)
                assert used <= room, f"pass {of}: {spec.values()}"


@pytest.mark.parametrize("arch", ARCHS)
def test_a_bound_of_kept_keys_may_be_any_number(routes: Routes, arch: int) -> None:
    """One that exceeds all numbers of keys says as little as the largest of these."""
    bounded = 0
    for seed in range(1000):
        spec = routes.draw(arch, seed)
        if spec.mask != INTERVALS:
            continue
        bounded += 1
        for of in ("plan", "forward", "backward"):
            spec.max_kept = 2**31 - 1
            route = routes.route(arch, spec, of)
            spec.max_kept = 2**63 - 1
            assert routes.route(arch, spec, of) == route, f"{of}: {spec.values()}"
    assert bounded > 100


@pytest.mark.parametrize("arch", ARCHS)
def test_parts_of_rows_that_are_selected(routes: Routes, arch: int) -> None:
    """They cover each key once, and have separate places in the workspace."""
    shared = 0
    for seed in range(1, 5000, 5):  # of one query
        spec = routes.draw(arch, seed)
        route = routes.route(arch, spec, "selection")
        if route.get("kernel") != "parts":
            continue
        shared += 1
        keys, parts = route["part_keys"], route["row_parts"]
        assert keys * (parts - 1) < spec.keys <= keys * parts
        rows, rest = divmod(route["blocks"], parts)
        assert (rest, keys % 8192) == (0, 0)
        assert len(route["launches"]) == (5 if spec.float32 else 4)
        assert ("seen" in route["workspace"]) == bool(spec.mask and spec.sink)  # with keep_last
        sizes = {"states": 128 * rows, "lists": 64 * (route.get("listed", 0) + 1) * route["blocks"]}
        end = 0
        for name, (offset, size) in route["workspace"].items():
            assert offset == end
            assert size >= sizes.get(name, 1)
            end += size
        assert end == route["workspace_bytes"]
    assert shared > 50


def everyday(**changed: int) -> Spec:
    return problem(4, 8, 8, 64, 1024, 1024, causal=1, **changed)


@pytest.mark.parametrize(
    ("head_dim", "usual", "rare"), [(24, 32, 64), (96, 96, 128), (136, 192, 256)]
)
def test_larger_tiles_serve_rare_calls(
    routes: Routes, head_dim: int, usual: int, rare: int
) -> None:
    """Rows that are not aligned; backward, a bias per query and, on sm_90, a softcap."""

    def served(arch: int, of: str, **changed: int) -> int:
        spec = problem(4, 8, 8, head_dim, 1024, 1024, causal=1, **changed)
        found: int = routes.route(arch, spec, of)["head_dim"]
        return found

    for arch in ARCHS:
        for of in ("forward", "backward"):
            assert served(arch, of) == usual
        assert served(arch, "forward", odd=1, rows=4096, total_keys=4096, page=64) == rare
        assert served(arch, "backward", bias=2, sink=1, deterministic=1) == rare
        assert served(arch, "forward", softcap=1) == usual
        assert served(arch, "backward", softcap=1) == (rare if arch == 90 else usual)


@pytest.mark.parametrize(
    ("odd", "kernel"),
    [(0, "boxes"), (1, "general"), (2, "general"), (16, "persistent"), (64, "general")],
)
def test_rows_that_lie_otherwise_take_other_kernels(routes: Routes, odd: int, kernel: str) -> None:
    """Q or a result is not aligned; the driver lacks TMA boxes; rows are too far apart."""
    pages = {"rows": 4096, "total_keys": 4096, "page": 64} if odd == 1 else {}
    assert routes.route(90, everyday(odd=odd, **pages), "forward")["kernel"] == kernel


# Bits of the head dimensions 32, 64, 96, 128, 192, 256 without kernels in the pack.
@pytest.mark.parametrize(
    ("missing", "kernel", "dim"),
    [
        (0, "pair_bias_windows", 32),
        (0b000001, "pair_bias_sm90", 64),
        (0b000011, "pair_bias_sm90", 128),
        (0b001011, "pair_bias", 96),
        (0b001111, "general", 256),
    ],
)
def test_few_head_dims_serve_what_they_have_kernels_for(
    routes: Routes, missing: int, kernel: str, dim: int
) -> None:
    """Kernels of larger head dimensions then serve heads of 32 columns, in another way."""
    spec = problem(1024, 1, 1, 32, 64, 64, bias=2, float32=1, missing=missing)
    if kernel == "pair_bias_sm90":  # no windows: most of a tile would be empty
        spec.queries = spec.keys = 128
    found = routes.route(90, spec, "forward")
    assert (found["kernel"], found["head_dim"]) == (kernel, dim)


@pytest.mark.parametrize("arch", ARCHS)
def test_routes_are_chosen_sooner_than_a_kernel_is_launched(routes: Routes, arch: int) -> None:
    """It takes less than a microsecond with full optimization, which this build lacks."""
    for known in known_routes(arch):
        if "name" not in known or known["pass"] not in ("forward", "backward"):
            continue
        spec = Spec(**known["problem"])
        of = ("plan", "forward", "backward").index(known["pass"])
        times = [routes.library.route_time(arch, ctypes.byref(spec), of, 200) for _ in range(5)]
        assert min(times) < 5000, known["name"]


def test_launch_code_decides_nothing() -> None:
    """Launch code does not depend on the device or on the tensors' layout."""
    launching = re.compile(r"^(?:inline )?cudaError_t \w+\(.*?^\}", re.MULTILINE | re.DOTALL)
    words = ("rows_are_aligned", "cudaDevAttr", "kSmLimit", "sm_count", "ceil_div")
    found = []
    for path in (ROOT / "cpp" / "cuda").rglob("*.cu*"):
        for function in launching.findall(path.read_text()):
            found += [f"{path.name}: {word}" for word in words if word in function]
    assert not found


def test_tuned_constants_stand_in_the_tables() -> None:
    """No kernel or launch has a constant with the name of a choice."""
    name = re.compile(r"\bk(?:Most|Least|Few|Many)[A-Z]\w*")
    sources = [path for path in (ROOT / "cpp").rglob("*") if path.suffix in (".cu", ".cuh", ".h")]
    found = {path.name: name.findall(path.read_text()) for path in sources}
    assert not {file: names for file, names in found.items() if names}


def test_routes_name_the_kernels_that_there_are() -> None:
    """Known routes cover all kernels but those of the mass, lists and gates."""
    launched = {
        name
        for arch in ARCHS
        for known in known_routes(arch)
        for name in known["route"]["launches"]
    }
    sources = (path.read_text() for path in (ROOT / "cpp" / "cuda").glob("**/*.cu*"))
    kernel = re.compile(r"__global__[^;{]*?(\w+)\(const __grid_constant__")
    there = {name for source in sources for name in kernel.findall(source)}
    others = {"key_mass_kernel_sm90", "round_list_sums"}
    others |= {"list_forward_kernel", "list_backward_kernel", "list_backward_kernel_sm90"}
    others |= {"sum_chunks", "write_decay", "write_gate_gradient"}
    assert launched == there - others


def test_routes_need_no_cuda() -> None:
    for path in Path(ROOT, "cpp/cuda/route").iterdir():
        assert "#include <cuda" not in path.read_text(), path.name
