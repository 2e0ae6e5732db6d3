# SPDX-License-Identifier: BSD-3-Clause
"""The results that are committed, and what the pages say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flash_dmattn.bench import bars, render, results  # noqa: E402
from flash_dmattn.bench.__main__ import main  # noqa: E402
from flash_dmattn.bench.show import read_results  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGE = ROOT / "docs" / "benchmarks.md"
MIB = 1 << 20


def values_of(name: str) -> dict[tuple[str, str, str], float]:
    """The numbers of a file by case, contestant and quantity."""
    written = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())
    return {r.key: r.value for r in results.records_of(written) if r.value is not None}


def least(found: dict[tuple[str, str, str], float], case: str, quantity: str) -> float:
    """The least of the forms of SDPA."""
    forms = ("sdpa", "sdpa_expanded", "sdpa_gqa")
    return min(found[case, form, quantity] for form in forms)


def test_cpu_results_in_the_readme_are_those_of_the_benchmark() -> None:
    found = values_of("cpu")
    expected = []
    for case, ours, quantity in (
        ("masked-4k", "intervals", "forward"),
        ("masked-4k", "intervals", "forward_backward"),
        ("dense-4k-float32", "no_mask", "forward"),
    ):
        theirs = least(found, case, quantity)
        expected.append(f"| {found[case, ours, quantity] * 1e3:.1f} ms | {theirs * 1e3:.1f} ms |")
    ours_bytes = found["masked-4k", "intervals", "memory_with_mask"]
    their_bytes = least(found, "masked-4k", "memory_with_mask")
    expected.append(f"| {ours_bytes / MIB:.1f} MiB | {their_bytes / MIB:.1f} MiB |")
    assert [row for row in expected if row not in README] == []


def test_gpu_results_in_the_readme_are_those_of_the_benchmark() -> None:
    found = values_of("h200")
    for quantity in ("forward", "backward", "forward_backward"):
        cells = (
            f"{found['heads32-8k', contestant, quantity] * 1e3:.2f} ms"
            for contestant in ("intervals", "dense_cudnn", "dense_flash", "sdpa")
        )
        assert f"| {' | '.join(cells)} |" in README
    assert f"takes {found['decode-64k', 'key_mask', 'forward'] * 1e3:.3f} ms" in README


def test_page_shows_the_committed_results() -> None:
    paths = ["--results", str(ROOT / "benchmarks"), "--page", str(PAGE)]
    assert main(["render", *paths, "--figures", str(ROOT / "docs" / "figures"), "--check"]) == 0


def test_every_committed_file_has_its_place_on_the_page() -> None:
    shown = {name for _, name, _ in render._BLOCK.findall(PAGE.read_text())}
    committed = {path.stem for path in results_files()}
    assert committed <= shown


def results_files() -> list[Path]:
    """The files of this benchmark's format; the demo and the maps have their own."""

    def schema(path: Path) -> Any:
        return json.loads(path.read_text()).get("schema")

    folder = ROOT / "benchmarks"
    return [path for path in sorted(folder.glob("*.json")) if schema(path) == results.SCHEMA]


@pytest.mark.parametrize("name", ["h200", "cpu"])
def test_committed_results_have_a_verdict_for_every_bar(name: str) -> None:
    written = read_results(ROOT / "benchmarks" / f"{name}.json")
    found = bars.verdicts(results.records_of(written), bars.bars_of(written))
    assert [verdict.bar.work for verdict in found if verdict.met is None] == []
