# SPDX-License-Identifier: BSD-3-Clause
"""The committed results, and the pages that show them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import bars, comparisons, generate, pages
from benchmarks.__main__ import main
from benchmarks.entrants import ENTRANTS
from docs_tools.blocks import blocks

ROOT = Path(__file__).resolve().parents[2]
FOUND = pages.read_folder(pages.RESULTS)


def test_pages_show_the_committed_results() -> None:
    assert main(["render", "--check"]) == 0


def test_every_block_stands_on_a_page_and_says_something() -> None:
    shown = {name for page in pages.PAGES for name in blocks((ROOT / page).read_text())}
    bodies = pages.block_bodies(FOUND)
    assert shown == bodies.keys()
    awaited = {
        name
        for name, compared in comparisons.COMPARISONS.items()
        if not any(one.file in FOUND for one in compared)
    }
    assert {name for name, body in bodies.items() if "|" not in body} == awaited


@pytest.mark.parametrize("name", pages.HEADLINES)
def test_headlines_have_all_their_lines(name: str) -> None:
    assert len(pages.headlines(name, FOUND).rows) == len(pages.headline_keys(name))


def test_page_explains_every_contestant() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    named = {*ENTRANTS, *generate.METHODS} - {"flash_dmattn"}
    assert sorted(name for name in named if f"`{name}`" not in page) == []


@pytest.mark.parametrize("name", ["h200", "h100-decode", "cpu", "h200-generate"])
def test_committed_results_have_a_verdict_for_every_bar(name: str) -> None:
    assert [v.bar.work for v in bars.verdicts(FOUND[name]) if v.met is None] == []
