# SPDX-License-Identifier: BSD-3-Clause
"""The results that are committed, and what the pages say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flash_dmattn.bench import bars, generate, headlines, render, results  # noqa: E402
from flash_dmattn.bench.__main__ import main  # noqa: E402
from flash_dmattn.bench.contestants.entrants import ENTRANTS  # noqa: E402
from flash_dmattn.bench.show import read_results  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "benchmarks.md"
OF_README = ("readme-cpu", "readme-h200")


def test_pages_show_the_committed_results() -> None:
    paths = ["--results", str(ROOT / "benchmarks"), "--page", str(PAGE), str(README)]
    assert main(["render", *paths, "--figures", str(ROOT / "docs" / "figures"), "--check"]) == 0


def test_every_committed_file_has_its_place_on_the_page() -> None:
    shown = {name for _, name, _ in render._BLOCK.findall(PAGE.read_text())}
    committed = {path.stem for path in results_files()}
    assert committed <= shown


@pytest.mark.parametrize(("page", "block"), [(PAGE, "summary"), *((README, b) for b in OF_README)])
def test_tables_at_the_beginning_have_all_their_lines(page: Path, block: str) -> None:
    assert block in {name for _, name, _ in render._BLOCK.findall(page.read_text())}
    measured = {path.stem for path in results_files()}
    found = {
        line.file: read_results(ROOT / "benchmarks" / f"{line.file}.json")
        for line in headlines.HEADLINES[block]
        if line.file in measured
    }
    lines = [line for line in headlines.HEADLINES[block] if line.file in found]
    assert len(headlines.headlines(block, found).rows) == len(lines) > 0


def test_page_explains_every_contestant() -> None:
    page = PAGE.read_text()
    named = {*ENTRANTS, *generate.METHODS} - {"flash_dmattn"}
    assert sorted(name for name in named if f"`{name}`" not in page) == []


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
