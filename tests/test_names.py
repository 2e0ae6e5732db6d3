# SPDX-License-Identifier: BSD-3-Clause
"""Names in the project's texts exist: files, folders, runnable modules, verbs."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from release.__main__ import VERBS

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = [".ci", ".github", "benchmarks", "cmake", "conda", "cpp", "docs", "docs_tools"]
FOLDERS += ["examples", "python", "rehearsal", "release", "scripts", "tests"]
SUFFIXES = {"", ".c", ".cmake", ".cpp", ".cu", ".cuh", ".h", ".in", ".md", ".py", ".pyi", ".sh"}
SUFFIXES |= {".toml", ".yaml", ".yml"}
# A path from the root, not part of an address or a longer path. Fields and capitals in their place
# match anything.
PATH = re.compile(rf"(?<![\w./@:!}}-])(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./*{{}}-]*")
FILLED_IN = re.compile(r"\{\w*\}|(?<![A-Z])(?:NAME|VERSION)(?![A-Z])")
# A file without its folder, with a suffix that only sources and pages have.
FILE = re.compile(r"(?<![\w.*/{}<>$-])(?<!-m )[\w-]+\.(?:cmake|cpp|cu|cuh|md|py|yml)\b")
MODULE = re.compile(r"-m ((?:flash_dmattn|benchmarks|demo|rehearsal|release)\b[\w.]*)(?: (\w+))?")

# Files that a user's command writes, that nvcc reads, of torch, and of Python's own library.
OTHER_FILES = {"notes.md", "module.cu", "version.py"}
OTHER_FILES |= {f"{name}.py" for name in sys.stdlib_module_names}
# It names files of other projects' repositories.
OF_OTHERS = ROOT / "tests" / "peers" / "suites.py"
# Members of wheels that tests make.
OTHER_PATHS = {"tests/test_x.py", "tests/__init__.py"}
# transformers has it.
OTHER_PATHS |= {"tests/test_modeling_common.py"}


def texts() -> list[Path]:
    """Return the files that people write and read, without data and this file."""
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    return [
        path
        for path in [*ROOT.glob("*.*"), *inside]
        if path.is_file() and path.suffix in SUFFIXES and "__pycache__" not in path.parts
        if path not in (Path(__file__), OF_OTHERS)
    ]


FILE_NAMES = OTHER_FILES | {path.name for path in texts()}


def is_there(name: str) -> bool:
    pattern = FILLED_IN.sub("*", name.rstrip("./-"))
    if "*" in pattern:
        return any(True for _ in ROOT.glob(pattern))
    return (ROOT / pattern).exists() or pattern in OTHER_PATHS


def is_module(name: str) -> bool:
    path = name.rstrip(".").replace(".", "/")
    places = [ROOT / folder / path for folder in ("", "python", "examples")]
    return any(place.is_dir() or place.with_suffix(".py").is_file() for place in places)


def stale_names(text: str, *, files: bool = True) -> Iterator[str]:
    """Yield the names in a text that do not exist; ``files`` also checks names without a folder."""
    yield from (name for name in PATH.findall(text) if not is_there(name))
    for module, verb in MODULE.findall(text):
        if not is_module(module) or (module == "release" and verb and verb not in {*VERBS, "VERB"}):
            yield f"-m {module} {verb}".rstrip()
    if files:
        yield from (name for name in FILE.findall(text) if name not in FILE_NAMES)


@pytest.mark.parametrize("folder", ["", *FOLDERS])
def test_what_is_named_is_there(folder: str) -> None:
    stale = {
        str(path.relative_to(ROOT)): names
        for path in texts()
        if folder == path.relative_to(ROOT).parts[0] or (not folder and path.parent == ROOT)
        # Tests create their own files.
        if (names := list(stale_names(path.read_text(), files=folder != "tests")))
    }
    assert stale == {}


@pytest.mark.parametrize(
    ("text", "stale"),
    [
        ("see scripts/absent, and scripts/lint.", ["scripts/absent"]),
        ("(`docs/absent.md`)", ["docs/absent.md"]),
        ("docs/index.md#why tests/gpu/ .github/workflows/ci.yml", []),
        ("scripts/*.py docs/*.rst", ["docs/*.rst"]),
        ('f"examples/{name}.py" f"examples/{name}.rs"', ["examples/{name}.rs"]),
        ("https://example.org/docs/x !!python/object ../tests/x", []),
        ("as in absent_one.py and in CONTRIBUTING.md", ["absent_one.py"]),
        ("python -m release packs, python3 -m release VERB", []),
        ("python -m release absent", ["-m release absent"]),
        (
            "python -m flash_dmattn --json; python -m flash_dmattn.absent",
            ["-m flash_dmattn.absent"],
        ),
    ],
)
def test_stale_names_are_found(text: str, stale: list[str]) -> None:
    assert list(stale_names(text)) == stale
