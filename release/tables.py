# SPDX-License-Identifier: BSD-3-Clause
"""Checks or writes the files that are derived from cmake/targets.json and the build's options.

These are blocks of pages between <!-- NAME --> and <!-- end NAME -->, and conda/variants.yaml.
pyproject.toml and release/cibuildwheel.toml repeat facts of the table, which are only checked.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from docs_tools.blocks import blocks, filled
from release import targets
from release.project import ROOT, ReleaseError, pyproject_value
from release.targets import Table, version_numbers

MEASURED = ROOT / "release" / "measured.json"  # a build of all packs, with its date
_NAME = re.compile(r"\b(?:FLASH_DMATTN|CMAKE)_[A-Z_]+\b|\bCUDAARCHS\b")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", action="store_true", help="renew the files that differ")


def run(options: argparse.Namespace) -> None:
    """Check that all derived files agree, or write them."""
    table = targets.load()
    problems = list(disagreements(table))
    for problem in problems:
        print(f"release tables: {problem}", file=sys.stderr)
    drifted = bool(problems)
    for path, expected in derived_files(table):
        present = path.read_text(encoding="utf-8") if path.exists() else ""
        if present == expected:
            continue
        name = path.relative_to(ROOT)
        if options.write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(expected, encoding="utf-8")
            print(f"release tables: wrote {name}")
            continue
        drifted = True
        sys.stdout.writelines(
            difflib.unified_diff(
                present.splitlines(keepends=True),
                expected.splitlines(keepends=True),
                str(name),
                "what the table gives",
            )
        )
    if drifted:
        raise ReleaseError("run python -m release tables --write")


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    columns = list(head)
    lines = [f"| {' | '.join(cells)} |" for cells in [columns, *rows]]
    lines.insert(1, "|---" * len(columns) + "|")
    return "\n".join(lines) + "\n"


RECORDS = {
    "run": "yes, all tests",
    "tiles": "no; its tiles on 9.0",
    "self-test": "no; its tiles on 9.0; self-test",
    "none": "no: with `FLASH_DMATTN_UNTRIED=1` only",
}


def support_table(table: Table) -> str:
    """Return the table of compute capabilities: their packs, CUDA majors and oldest drivers."""
    rows = []
    for capability, archs in table.preference.items():
        best = table.arch(archs[0])
        served = [cuda for cuda in table.cuda if best in table.released(cuda)]
        floor = functools.partial(table.min_driver, best)
        rows.append(
            [
                capability,
                ", ".join(archs),
                ", ".join(f"{cuda.major} ({floor(cuda)})" for cuda in served),
                RECORDS[table.record[capability]],
            ]
        )
    head = ["compute capability", "packs, best first", "CUDA (oldest driver)", "run there"]
    return markdown(head, rows)


def platform_table(table: Table) -> str:
    """Return the table of platforms: their wheels and the requirements of these."""
    limits = table.wheel
    return markdown(
        ["platform", "wheel", "system", "Python", "CUDA toolkits", "seen"],
        [
            [
                f"Linux {row.machine}",
                f"`cp{table.pythons[0].replace('.', '')}-abi3-{limits.policy}_{row.machine}`",
                f"glibc {limits.glibc} or newer",
                f"{table.pythons[0]} or newer, tested to {table.torch_python}",
                ", ".join(cuda.toolkit for cuda in table.cuda),
                row.seen,
            ]
            for row in table.platforms
        ]
        + [
            [
                row.name,
                f"`cp{table.pythons[0].replace('.', '')}-abi3-{row.tag}`",
                _system(row.tag),
                f"{table.pythons[0]} or newer",
                "none",
                row.seen,
            ]
            for row in table.cpu_platforms
        ],
    )


def _system(tag: str) -> str:
    found = re.fullmatch(r"macosx_(\d+)_(\d+)_\w+", tag)
    return f"macOS {found[1]}.{found[2]} or newer" if found else "64-bit Windows"


def build_options(_: Table) -> str:
    """Return the table of the options in cmake/Options.cmake, described by its comment.

    Raises:
        ReleaseError: the comment does not describe a declared option.
    """
    text = (ROOT / "cmake" / "Options.cmake").read_text(encoding="utf-8")
    meanings: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if found := re.fullmatch(r"#   ([A-Z_]{4,})  +(.+)", line):
            name = found[1]
            meanings[name] = found[2]
        elif name and (found := re.fullmatch(r"# {10,}(.+)", line)):
            meanings[name] += f" {found[1]}"
        else:
            name = ""
    declared = re.findall(
        r'^ +(?:set|option)\((FLASH_DMATTN_\w+) "([^"]*)" ?(.*)\)$', text, re.MULTILINE
    )
    rows = []
    for option, first, rest in declared:
        if option not in meanings:
            raise ReleaseError(
                f"cmake/Options.cmake declares {option}, but does not tell its meaning"
            )
        default = first if rest.startswith("CACHE") else rest
        meaning = _NAME.sub(lambda found: f"`{found[0]}`", meanings[option]).replace("|", "\\|")
        rows.append([f"`{option}`", f"`{default}`" if default else "empty", meaning])
    return markdown(["option", "default", "meaning"], rows)


def pack_table(table: Table) -> str:
    """Return the table of a release's packs: sizes, build times, spills and runs on GPUs."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))["packs"]
    rows = []
    for cuda in table.cuda:
        for arch in table.released(cuda):
            name = f"cu{cuda.major}-{arch.name}"
            cells = ["not measured"] * 3
            if known := measured.get(name):
                cells = [
                    f"{known['bytes'] / 10**6:.1f}",
                    f"{known['cpu_seconds'] / 60:.0f}",
                    f"{known['spilling']} of {known['kernels']}, {known['spill_bytes']} bytes",
                ]
            budget, record = str(cuda.packs[arch.name]), table.record[arch.capabilities[0]]
            rows.append([name, budget, *cells, RECORDS[record]])
    head = [
        "pack",
        "MB at most",
        "MB",
        "CPU minutes",
        "kernels that spill",
        "run on such a GPU, as built by CUDA 13.0",
    ]
    return markdown(head, rows)


def wheel_table(table: Table) -> str:
    """Return the table of a wheel's parts, with the build costs of its packs."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    wheel = measured["wheel"]
    rows = []
    for cuda in table.cuda:
        archs = table.released(cuda, wheel["machine"])
        packs = [measured["packs"][f"cu{cuda.major}-{arch.name}"] for arch in archs]
        rows.append(
            [
                f"{len(packs)} packs of CUDA {cuda.major}",
                f"{wheel['parts'][f'cu{cuda.major}'] / 10**6:.1f}",
                f"{sum(pack['cpu_seconds'] for pack in packs) / 60:.0f}",
                f"{max(pack['compiler_mb'] for pack in packs)} MB",
                f"{sum(pack['disk_mb'] for pack in packs)} MB",
            ]
        )
    rows.append(["the rest", f"{wheel['parts']['base'] / 10**6:.1f}", "", "", ""])
    whole = f"{wheel['bytes'] / 10**6:.1f}, at most {table.wheel.max_wheel_mb}"
    rows.append(["the wheel", whole, "", "", ""])
    head = ["part", "MB, compressed", "CPU minutes", "memory of a compiler", "disk"]
    return markdown(head, rows)


BLOCKS: Mapping[str, Callable[[Table], str]] = {
    "pack-table": pack_table,
    "wheel-table": wheel_table,
    "support-table": support_table,
    "platform-table": platform_table,
    "build-options": build_options,
}


def fill_blocks(text: str, table: Table) -> str:
    """Return a page with new contents of these blocks; blocks of other names stay unchanged.

    Raises:
        ReleaseError: a block does not end.
    """
    return filled(text, {name: make(table) for name, make in BLOCKS.items()})


def conda_variants(table: Table) -> str:
    """Return conda's build variants. The recipe is built for each combination of their entries."""
    glibc = table.wheel.glibc
    lines = [
        "# Made by `python -m release tables` from cmake/targets.json; do not edit.",
        "cuda_compiler:",
        "  - cuda-nvcc",
        "cuda_compiler_version:",
        '  - "None"',
        *(f'  - "{cuda.toolkit}"' for cuda in table.cuda),
        "c_stdlib:",
        "  - sysroot",
        "c_stdlib_version:",
        f'  - "{glibc}"',
        "python:",
        *(f'  - "{python}"' for python in table.pythons),
        "python_min:",
        f'  - "{table.pythons[0]}"',
    ]
    return "\n".join(lines) + "\n"


def derived_files(table: Table, root: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """Yield every file that is derived, in part or whole, and its expected content."""
    for page in sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md")]):
        text = page.read_text(encoding="utf-8")
        if BLOCKS.keys() & blocks(text):
            yield page, fill_blocks(text, table)
    yield root / "conda" / "variants.yaml", conda_variants(table)


def disagreements(table: Table) -> Iterator[str]:
    """Yield the facts in other files that differ from the table."""
    tag = f"cp{table.free_threaded.replace('.', '')}"
    floor = pyproject_value("requires-python").removeprefix(">=")
    if floor != table.pythons[0]:
        yield f"pyproject.toml asks for Python {floor}, the table begins at {table.pythons[0]}"
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    classified = tuple(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project))
    if classified != table.torch_pythons:
        yield f"pyproject.toml has classifiers of Python {', '.join(classified)}, not the table's"
    floor_without_gil = f'if.python-version = ">={table.free_threaded}"'
    if {floor_without_gil, f'wheel = {{ py-api = "{tag}t" }}'} - set(project.splitlines()):
        yield f"pyproject.toml does not build {tag}t from Python {table.free_threaded} on"
    wanted = [f"cp3{{{','.join(p[2:] for p in table.pythons)}}}-manylinux_*", f"{tag}t-manylinux_*"]
    if f'build = "{" ".join(wanted)}"' not in (ROOT / "release" / "cibuildwheel.toml").read_text():
        yield f"release/cibuildwheel.toml does not build {' '.join(wanted)}"
    if f'"torch>={table.min_torch}"' not in project:
        yield f"pyproject.toml does not ask for torch>={table.min_torch}, as the table does"
    for cuda in table.cuda:
        if version_numbers(cuda.min_toolkit) > version_numbers(cuda.toolkit):
            yield f"CUDA {cuda.major}: min_toolkit is newer than toolkit"
        if cuda.toolkit.replace(".", "_") not in cuda.image:
            yield f"CUDA {cuda.major}: the image is not of toolkit {cuda.toolkit}"
