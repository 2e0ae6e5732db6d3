# SPDX-License-Identifier: BSD-3-Clause
"""The documentation's examples run, and its links resolve."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from flash_dmattn.__main__ import ExitCode
from flash_dmattn.loader import messages
from old_versions import why_not_traced, why_nothing_forgotten

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# The package that a page's examples need; without it they are skipped, like other tests.
NEEDED = {"integrations.md": "transformers"}
LINK = re.compile(r"\]\(([^)\s]+)\)")
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


class Block(NamedTuple):
    """One fenced block of a page."""

    language: str
    line: int  # of its first line of code
    code: str


def blocks(text: str) -> Iterator[Block]:
    for match in FENCE.finditer(text):
        yield Block(match[1], text.count("\n", 0, match.start(2)) + 1, match[2])


def anchors(text: str) -> set[str]:
    """Return GitHub's anchors for the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _lacks(code: str) -> str:
    """Return why old versions cannot run an example, or "". No later example uses its results."""
    if "torch.compile(" in code:
        return why_not_traced()
    return why_nothing_forgotten() if "layer.kept" in code else ""


pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pages
def test_examples_run(page: Path) -> None:
    if page.name in NEEDED:
        pytest.importorskip(NEEDED[page.name])
    examples = [block for block in blocks(page.read_text()) if block.language == "python"]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    left_out = set()
    for example in examples:
        if reason := _lacks(example.code):
            left_out.add(reason)
            continue
        # Leading blank lines make a traceback show the page's line.
        code = "\n" * (example.line - 1) + example.code
        exec(compile(code, str(page), "exec", dont_inherit=True), namespace)
    if left_out:
        pytest.skip(f"all ran but an example: {'; '.join(left_out)}")


@pages
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            broken.append(link)
    assert broken == []


def test_no_table_stands_twice() -> None:
    # Skips the heading and the line below it.
    rows = [
        row
        for page in PAGES
        for row in {
            row for table in TABLE.findall(page.read_text()) for row in table.splitlines()[2:]
        }
    ]
    assert [row for row, count in Counter(rows).items() if count > 1] == []


def test_blocks_are_found_with_their_lines() -> None:
    text = "a\n```python\nx = 1\n```\n\n```bash\nls\n```\n"
    assert list(blocks(text)) == [Block("python", 3, "x = 1\n"), Block("bash", 7, "ls\n")]


# --- the pages on installing and distributing

TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text()
ROW = re.compile(r"^\| (.+?) \| (.*?) \| (.*?) \|$", re.MULTILINE)


def entries(*, of_loader: bool = False) -> dict[str, tuple[str, str]]:
    """Return the cause and the fix of each message of docs/troubleshooting.md.

    ``of_loader`` omits the messages of pip and the build.
    """
    page = TROUBLES.partition("\n## Installing and building\n")[0] if of_loader else TROUBLES
    found = {}
    for texts, cause, fix in ROW.findall(page):
        if texts != "message":
            heads = re.findall(r"`([^`]+)`", texts) or [texts]
            found.update(dict.fromkeys(heads, (cause, fix)))
    return found


def in_general(template: str) -> str:
    """Return a text with … in place of its fields."""
    return re.sub(r"\{[^{}]+\}", "…", template)


def has_entry(text: str) -> bool:
    """Say whether an entry is this text, or what it begins with, if that is long enough."""
    begins = [entry.removesuffix("…") for entry in entries() if entry.endswith("…")]
    return text in entries() or text.startswith(tuple(part for part in begins if len(part) > 18))


@pytest.mark.parametrize("name", messages.catalogue())
def test_every_text_of_the_loader_has_an_entry(name: str) -> None:
    assert has_entry(in_general(messages.catalogue()[name]))


def test_a_text_without_an_entry_is_found() -> None:
    assert has_entry("no pack supports compute capability …; and so on")
    assert not has_entry("no pack likes compute capability …")
    assert not has_entry("it is")


def test_every_text_of_the_core_about_packs_has_an_entry() -> None:
    source = (ROOT / "cpp" / "core" / "library.cpp").read_text()
    calls = re.findall(r"refuse\(path_?, (.*?)\);", source, re.DOTALL)
    assert len(calls) >= 7
    for call in calls:
        literals = re.findall(r'"((?:[^"\\]|\\.)*)"', call)
        pattern = ".*".join(re.escape(text) for text in literals if text != "no reason given")
        is_told = has_entry("…".join(literals)) or any(re.search(pattern, e) for e in entries())
        assert is_told, pattern


def test_every_entry_tells_cause_and_fix() -> None:
    assert len(entries()) > 50
    assert [text for text, told in entries().items() if not all(map(str.strip, told))] == []


def test_no_entry_is_left_of_a_text_that_was_changed() -> None:
    known = {in_general(template) for template in messages.catalogue().values()}
    # Without spaces and the quotes of split literals; a field ends a piece.
    sources = "".join(
        re.sub(r'"\s*f?"|\s', "", path.read_text())
        for folder in ("python", "cpp")
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in {".py", ".cpp", ".cu", ".h"}
    )
    stale = []
    for text in entries(of_loader=True):
        pieces = [re.sub(r"\s", "", piece.strip(" :;,.")) for piece in text.split("…")]
        if text not in known and not all(piece in sources for piece in pieces):
            stale.append(text)
    # These continue in the words of the system's loader.
    assert [text for text in stale if not text.startswith("dlopen failed: …: ")] == []


def test_exit_codes_are_documented() -> None:
    page = (ROOT / "docs" / "packs.md").read_text()
    section = page.partition("\n| exit code |")[2].partition("\n\n")[0]
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}
    assert documented == {int(code) for code in ExitCode}


def test_variables_of_the_build_are_documented() -> None:
    page = (ROOT / "docs" / "maintainers.md").read_text()
    sources = [ROOT / "CMakeLists.txt", *sorted((ROOT / "cmake").glob("*.cmake"))]
    read = {name for path in sources for name in re.findall(r"ENV\{(\w+)\}", path.read_text())}
    assert "CUDACXX" in read
    # DESTDIR belongs to "cmake --install", not to this project.
    assert sorted(name for name in read - {"DESTDIR"} if f"`{name}`" not in page) == []
