# SPDX-License-Identifier: BSD-3-Clause
"""Facts with one declaration that pages and comments repeat in words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from release import targets
from release.project import pyproject_value

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md"))]
PACK = (ROOT / "cpp" / "pack.h").read_text()
TABLE = targets.load()
# "AttentionInputs and SelectionInputs of record.py"
DEFINED = re.compile(r"\b([A-Z]\w+)(?:(?:,| and) ([A-Z]\w+))? of ((?:\w+/)*\w+\.py)\b")


class Fact(NamedTuple):
    """A pattern for a fact in texts, with groups for its values, and their expected values."""

    said: str
    values: tuple[str, ...]


def abi_version() -> str:
    found = re.search(r"#define FDM_PACK_ABI_VERSION (\d+)", PACK)
    assert found
    return found[1]


FLOOR = pyproject_value("requires-python").removeprefix(">=")
FACTS = {
    "ABI of packs": Fact(r"pack ABI (\d+)\b|ABI of packs is (\d+)", (abi_version(),)),
    "version in messages": Fact(
        r", flash_dmattn (\d[\w.]*), pack ABI", (pyproject_value("version"),)
    ),
    "limits of files": Fact(
        r"wheel may have (\d+) MB",
        (str(TABLE.wheel.max_wheel_mb),),
    ),
    "limit of a wheel": Fact(
        r"wheel\W+(?:\w+\W+){0,4}limit of (\d+) MB", (str(TABLE.wheel.max_wheel_mb),)
    ),
    "least Python": Fact(r"Python (?:from|≥) ?(\d\.\d+)", (FLOOR,)),
    "Pythons": Fact(r"Python (\d\.\d+) to (\d\.\d+)", (TABLE.pythons[0], TABLE.pythons[-1])),
    "least torch": Fact(r"torch from (\d\.\d+)", (TABLE.min_torch,)),
    "head dimensions": Fact(
        r"(?:head dimensions|D from|D may be any number from) 1 to (\d+)",
        (str(TABLE.head_dims[-1]),),
    ),
}


def differences(text: str, fact: Fact) -> list[str]:
    """Return the places of a text with another value."""
    text = " ".join(text.split())
    return [
        match[0]
        for match in re.finditer(fact.said, text)
        if tuple(value for value in match.groups() if value is not None) != fact.values
    ]


@pytest.mark.parametrize("name", FACTS)
def test_pages_say_what_is_declared(name: str) -> None:
    fact = FACTS[name]
    found = {page.name: wrong for page in PAGES if (wrong := differences(page.read_text(), fact))}
    assert found == {}


@pytest.mark.parametrize("name", sorted(set(FACTS) - {"limit of a wheel"}))
def test_every_fact_is_said_somewhere(name: str) -> None:
    texts = (" ".join(page.read_text().split()) for page in PAGES)
    assert any(re.search(FACTS[name].said, text) for text in texts)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ABI of packs", "x86_64, flash_dmattn 2.0.0a1, pack ABI 0, NVIDIA"),
        ("ABI of packs", "The ABI of packs is 0."),
        ("limit of a wheel", "would bring the aarch64 wheel near its limit of 0 MB"),
        ("limits of files", "A wheel may have 0\nMB, since"),
        ("head dimensions", "head dimensions 1 to 0"),
    ],
)
def test_another_value_is_found(name: str, text: str) -> None:
    assert len(differences(text, FACTS[name])) == 1


def test_design_names_every_entry_point_of_a_pack() -> None:
    (table,) = re.findall(r"typedef struct fdm_pack \{(.*?)\} fdm_pack;", PACK, re.DOTALL)
    declared = re.findall(r"\(\*(\w+)\)\(", table)
    assert declared[:2] == ["workspace_bytes", "plan"]
    page = (ROOT / "docs" / "design.md").read_text()
    (told,) = re.findall(r"these entry points: (.*?)\.\n", page, re.DOTALL)
    assert re.findall(r"`(\w+)`", told) == declared


def test_classes_are_in_the_files_that_texts_name() -> None:
    folders = ("python", "cpp", "docs", "benchmarks", "release")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    suffixes = {".py", ".h", ".cuh", ".cpp", ".cu", ".md"}
    named = {
        (str(path.relative_to(ROOT)), name, file)
        for path in sources
        if path.suffix in suffixes
        for *names, file in DEFINED.findall(re.sub(r"\n\W*", " ", path.read_text()))
        for name in filter(None, names)
    }
    stale = []
    for place, name, file in named:
        places = [path for path in sources if path.as_posix().endswith(f"/{file}")]
        if places and not any(f"class {name}" in path.read_text() for path in places):
            stale.append(f"{place}: {name} of {file}")
    assert ("cpp/core/record.h", "AttentionInputs", "record.py") in named
    assert stale == []
