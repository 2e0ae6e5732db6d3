# SPDX-License-Identifier: BSD-3-Clause
"""The routes of cpp/cuda/route, compiled for the CPU, and a table of problems with their routes.

After a change of routes, this rewrites the table for review:
    PYTHONPATH=tests python -m routes
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent
ARCHS = (80, 86, 90)
PASSES = ("plan", "forward", "backward", "selection")
HEAD_DIMS = (32, 64, 96, 128, 192, 256)


def _names(source: str, pattern: str) -> list[str]:
    found = re.search(pattern, source, re.DOTALL)
    assert found
    lines = [line.partition("//")[0] for line in found[1].splitlines()]
    return [name for line in lines for name in re.findall(r"(\w+)(?= = |,|;)", line) if name]


# The fields of a problem and the constants of a table, read from their sources.
FIELDS = _names((FOLDER / "routes.cpp").read_text(), r"struct Spec \{(.*?)\n\};")
CONSTANTS = [
    name
    for name in _names(
        (ROOT / "cpp" / "cuda" / "route" / "tables.h").read_text(),
        r"struct RouteTable \{(.*?)\n\};",
    )
    if not name.isdigit()
]


class Spec(ctypes.Structure):
    """A problem; all tensors are contiguous except as `odd` says."""

    _fields_ = [(name, ctypes.c_int64) for name in FIELDS]

    def values(self) -> dict[str, int]:
        """Return the nonzero fields."""
        return {name: getattr(self, name) for name in FIELDS if getattr(self, name)}


def compiler() -> str | None:
    """Return the C++ compiler, or None."""
    names = (os.environ.get("CXX"), "g++", "c++", "clang++")
    return next((name for name in names if name and shutil.which(name.split()[0])), None)


@dataclass
class Routes:
    """The functions of the compiled routes."""

    library: ctypes.CDLL

    @classmethod
    def compiled(cls, folder: Path) -> Routes:
        """Compile the routes into a folder, unless it has them."""
        path = folder / "libroutes.so"
        if path.exists():
            return cls.loaded(path)
        sources = [FOLDER / "routes.cpp", *sorted((ROOT / "cpp/cuda/route").glob("*.cpp"))]
        flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
        command = [*(compiler() or "c++").split(), *flags, f"-I{ROOT / 'cpp'}", *map(str, sources)]
        subprocess.run([*command, "-o", str(path)], check=True)
        return cls.loaded(path)

    @classmethod
    def loaded(cls, path: Path) -> Routes:
        """Load routes that have been compiled."""
        library = ctypes.CDLL(str(path))
        library.route_time.restype = ctypes.c_double
        library.workspace_room.restype = library.workspace_used.restype = ctypes.c_int64
        return cls(library)

    def table(self, arch: int) -> dict[str, int]:
        """Return the constants of an architecture."""
        values = (ctypes.c_int64 * 256)()
        assert self.library.route_table_of(arch, values) == len(CONSTANTS)
        return dict(zip(CONSTANTS, values, strict=False))

    def route(self, arch: int, spec: Spec, of: str, **changed: int) -> dict[str, Any]:
        """Return the route of a pass, with some constants changed."""
        table = {**self.table(arch), **changed}
        values = (ctypes.c_int64 * len(table))(*table.values())
        text = ctypes.create_string_buffer(1 << 14)
        self.library.route_of(arch, values, ctypes.byref(spec), PASSES.index(of), text, len(text))
        found: dict[str, Any] = json.loads(text.value)
        return found

    def way(self, arch: int, spec: Spec, of: str) -> str:
        """Return the short name of a pass's way."""
        text = ctypes.create_string_buffer(1 << 10)
        self.library.way_of(arch, ctypes.byref(spec), PASSES.index(of), text, len(text))
        return text.value.decode()

    def draw(self, arch: int, seed: int) -> Spec:
        """Return a problem whose sizes are often near constants."""
        spec = Spec()
        self.library.draw_spec(arch, ctypes.c_int64(seed), ctypes.byref(spec))
        return spec

    def find_way(
        self, arch: int, sms: int, way: str, seed: int, *, draws: int, most: tuple[float, ...]
    ) -> Spec | None:
        """Return a problem of contiguous tensors that takes a way of the forward or backward pass.

        Args:
            arch, sms: of the tiles and the device.
            way: its name.
            seed, draws: from which problems are drawn, and how many at most.
            most: limits of its size, as in find_way of routes.cpp.
        """
        spec = Spec()
        limits = map(ctypes.c_double, most)
        numbers = map(ctypes.c_int64, (seed, draws))
        of = PASSES.index(way.partition(":")[0])
        found = self.library.find_way(
            arch, ctypes.c_int64(sms), of, way.encode(), *numbers, *limits, ctypes.byref(spec)
        )
        return spec if found else None

    def find_change(
        self, arch: int, constant: str, value: int, focus: int, draws: int
    ) -> tuple[str, Spec] | None:
        """Return a pass and a problem whose route changes with a constant."""
        spec = Spec()
        found = self.library.find_change(
            arch,
            CONSTANTS.index(constant),
            ctypes.c_int64(value),
            focus,
            ctypes.c_int64(1),
            ctypes.c_int64(draws),
            ctypes.byref(spec),
        )
        return None if found < 0 else (PASSES[found], spec)


def table_path(arch: int) -> Path:
    """Return the file of the known routes of an architecture."""
    return FOLDER / f"sm{arch}.jsonl"


def known_routes(arch: int) -> list[dict[str, Any]]:
    """Return the lines of that file."""
    return [json.loads(line) for line in table_path(arch).read_text().splitlines()]
