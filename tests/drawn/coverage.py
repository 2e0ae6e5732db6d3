# SPDX-License-Identifier: BSD-3-Clause
"""The kernels of a pack that runs have launched, and the ways that their cases took.

scripts/fuzz --coverage prints it. tests/routes defines the ways.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import kernel_report
from routes.library import ARCHS, known_routes

# At least this many cases must launch each kernel; each instantiation needs one.
LEAST = 50


def instances_of(library: Path) -> dict[str, str]:
    """Return the readable names of a CUDA pack's kernels by symbol."""
    command = [kernel_report.find_cuobjdump(), "--dump-resource-usage", str(library)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kernels = kernel_report.parse_usage(usage, library.name)
    return kernel_report.short_names(kernel.symbol for kernel in kernels)


def tile_arch(pack: str) -> int:
    """Return the architecture whose tiles a pack has, from a name like "cu13-sm90-tiles86"."""
    tiles = int(re.findall(r"\d+", pack)[-1])
    return tiles if tiles in ARCHS else 80


def launched_by(runs: Iterable[Path]) -> Counter[str]:
    """Return for each symbol how many cases launched it."""
    cases: Counter[str] = Counter()
    for run in runs:
        cases.update(json.loads(run.read_text())["launched"])
    return cases


def report(names: dict[str, str], cases: Counter[str], least: int = LEAST) -> tuple[str, list[str]]:
    """Return a table of kernels and instantiations, and a line for each kernel with too few cases.

    Args:
        names: readable names of a pack's kernels by symbol.
        cases: how many cases launched each symbol.
        least: how many cases must launch each kernel, in any instantiation.
    """
    kernels: dict[str, list[tuple[int, str]]] = {}
    for symbol, name in names.items():
        kernels.setdefault(name.partition("<")[0], []).append((cases[symbol], name))
    lines, missing = [], []
    for kernel, instances in sorted(kernels.items()):
        total = sum(count for count, _ in instances)
        never = sum(count == 0 for count, _ in instances)
        lines.append(f"{total:>9}  {kernel}: {len(instances)} instantiations, {never} never")
        lines += [f"{count:>9}    {name}" for count, name in sorted(instances)]
        if total < least:
            missing.append(f"{kernel} was launched by {total} cases, fewer than {least}")
    return "\n".join(lines), missing


def known_ways(tile_arch: int) -> set[str]:
    """Return the ways in the known routes of an architecture, for a device with as many SMs as an
    H100.
    """
    return {
        known["way"]
        for known in known_routes(tile_arch)
        if "way" in known and known["problem"]["sms"] == 132
    }


def report_ways(known: set[str], cases: Counter[str], least: int = LEAST) -> tuple[str, list[str]]:
    """Return a table of the calls' ways, and a line for each way with too few cases."""
    taken = {name for name in cases if name.startswith(("forward: ", "backward: "))}
    lines = [f"{cases[way]:>9}  {way}" for way in sorted(known | taken)]
    missing = [
        f"{way} was taken by {cases[way]} cases, fewer than {least}"
        for way in sorted(known)
        if cases[way] < least
    ]
    return "\n".join(lines), missing
