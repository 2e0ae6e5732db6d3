# SPDX-License-Identifier: BSD-3-Clause
"""The documentation site: it has every page, builds strictly, and its figures are current."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flash_dmattn
from docs_tools.hooks import fetched_from_elsewhere

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
MOST_BYTES = 150 * 1024


def test_every_page_is_in_the_menu() -> None:
    listed = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in DOCS.glob("*.md"))


def test_api_page_has_every_public_name() -> None:
    page = (DOCS / "api.md").read_text()
    absent = [
        name
        for name in flash_dmattn.__all__
        if f"::: flash_dmattn.{name}\n" not in page and f"`{name}`" not in page
    ]
    assert absent == []


def test_strict_build(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings_handlers.python")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "api.html").read_text()
    for name in ("flash_dmattn_func", "IntervalMask.documents", "dynamic_mask", "make_plan"):
        assert f'id="flash_dmattn.{name}"' in api
    # Docstring sections are parsed, not left as text.
    assert "Args:" not in api
    assert "Returns:</span>" in api
    # Shapes in tables, whose pipes GitHub needs escaped.
    assert "<code>(B, {H|Hk|1}, K)</code>" in (tmp_path / "usage.html").read_text()
    pages = {page.name: page.read_text() for page in tmp_path.glob("*.html")}
    assert [name for name, page in pages.items() if r"\|" in page] == []
    # No table is left as text.
    assert [name for name, page in pages.items() if re.search(r"^\|.*-", page, re.MULTILINE)] == []


def test_what_browsers_fetch_is_found() -> None:
    html = """
    <link rel="canonical" href="https://a.example/page"><a href="https://b.example">b</a>
    <link rel="stylesheet" href="https://c.example/x.css"><link rel="icon" href="icon.png">
    <script src="//d.example/x.js"></script><img src="figures/map.png"><img src="http://e.example/p">
    """
    assert fetched_from_elsewhere(html) == [
        "https://c.example/x.css",
        "//d.example/x.js",
        "http://e.example/p",
    ]


def test_figures_are_those_that_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = [sys.executable, "-m", "docs_tools", "--output", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    drawn = sorted(path.name for path in tmp_path.glob("*.png"))
    assert len(drawn) >= 6
    for name in drawn:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG"), name
        assert (DOCS / "figures" / name).exists(), name


def test_every_figure_is_shown_and_small() -> None:
    pages = [ROOT / "README.md", *DOCS.glob("*.md")]
    text = "".join(page.read_text() for page in pages)
    figures = sorted((DOCS / "figures").glob("*.png"))
    assert [path.name for path in figures if f"figures/{path.name})" not in text] == []
    assert [path.name for path in figures if path.stat().st_size > MOST_BYTES] == []
