# SPDX-License-Identifier: BSD-3-Clause
"""cmake/targets.json: the declared table of archs, CUDA majors, platforms and Pythons."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from release.project import ROOT

TABLE = ROOT / "cmake" / "targets.json"


@dataclass(frozen=True)
class Arch:
    """A GPU architecture that packs are built for.

    Attributes:
        name: such as ``sm90``.
        code: the machine code in its packs, as nvcc names it, such as ``sm_90a``.
        capabilities: the compute capabilities that run it.
        min_cuda: the oldest CUDA that compiles it.
        required: every release has it, for every CUDA major.
        min_driver: the oldest driver that runs it; "" for any that runs the CUDA major.
        machines: the host architectures that have such GPUs; empty for all.
    """

    name: str
    code: str
    capabilities: tuple[str, ...]
    min_cuda: str
    required: bool
    min_driver: str = ""
    machines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cuda:
    """A CUDA major that packs are built with.

    Attributes:
        major: such as ``13``.
        toolkit: the version in the image, which builds releases.
        min_toolkit: the oldest version that builds.
        min_driver: the oldest driver that runs the packs.
        image: the container image of release builds, with ``{policy}`` and ``{machine}``.
        packs: the archs of a release, and the maximum size of their packs in millions of bytes.
    """

    major: str
    toolkit: str
    min_toolkit: str
    min_driver: str
    image: str
    packs: dict[str, int]


@dataclass(frozen=True)
class Platform:
    """A kind of Linux machine that wheels with every pack are built for.

    Attributes:
        machine: such as ``x86_64``.
        runner: the runner of CI.
        conda: its name in conda.
        seen: how far wheels were tested there, for the table of platforms.
    """

    machine: str
    runner: str
    conda: str
    seen: str


@dataclass(frozen=True)
class CpuPlatform:
    """Another system, whose wheel has only the cpu pack and is built on the runner itself.

    Attributes:
        name: such as ``macos-arm64``.
        machine: such as ``aarch64``.
        runner: the runner of CI.
        tag: the platform tag of its wheels, such as ``macosx_11_0_arm64``.
        seen: how far wheels were tested there, for the table of platforms.
    """

    name: str
    machine: str
    runner: str
    tag: str
    seen: str


@dataclass(frozen=True)
class Limits:
    """Limits on the dependencies and the sizes of a release wheel."""

    policy: str
    image: str
    glibc: str
    glibcxx: str
    cxxabi: str
    max_wheel_mb: int
    max_cpu_pack_mb: int


@dataclass(frozen=True)
class Table:
    """The whole table; archs and CUDA majors in ascending order.

    Attributes:
        pythons: with a GIL; ``free_threaded`` is the oldest supported Python without a GIL.
        min_torch: the oldest supported torch; torch.compile and torch.export trace every call
            from ``compiling_torch`` on.
        torch_python: the newest of the Pythons that ran calls with torch.
    """

    archs: tuple[Arch, ...]
    preference: dict[str, tuple[str, ...]]
    cuda: tuple[Cuda, ...]
    record: dict[str, str]
    platforms: tuple[Platform, ...]
    cpu_platforms: tuple[CpuPlatform, ...]
    wheel: Limits
    pythons: tuple[str, ...]
    free_threaded: str
    min_torch: str
    compiling_torch: str
    torch_python: str
    head_dims: tuple[int, ...]

    @property
    def torch_pythons(self) -> tuple[str, ...]:
        """The Pythons up to ``torch_python``. The tests need torch and run on these."""
        return self.pythons[: self.pythons.index(self.torch_python) + 1]

    def archs_of(self, toolkit: str, machine: str | None = None) -> tuple[Arch, ...]:
        """Return the archs that a toolkit compiles, for one kind of host machine or for all."""
        able = version_numbers(toolkit)
        return tuple(
            arch
            for arch in self.archs
            if version_numbers(arch.min_cuda) <= able
            and (machine is None or not arch.machines or machine in arch.machines)
        )

    def released(self, cuda: Cuda, machine: str | None = None) -> tuple[Arch, ...]:
        """Return a CUDA major's archs in a release, for one kind of host machine or for all."""
        able = self.archs_of(cuda.toolkit, machine)
        return tuple(arch for arch in able if arch.name in cuda.packs)

    def min_driver(self, arch: Arch, cuda: Cuda) -> str:
        """Return the oldest driver that runs packs of an arch and a CUDA major."""
        return max(cuda.min_driver, arch.min_driver or cuda.min_driver, key=version_numbers)

    def oversize(self, pack: Mapping[str, Any]) -> str:
        """Return an error if a pack of a manifest is too large, else "".

        Packs that no release has may have any size.
        """
        limit: float = self.wheel.max_cpu_pack_mb
        if pack["cuda"] is not None:
            limits = {row.major: row.packs for row in self.cuda}
            limit = limits.get(pack["cuda"].partition(".")[0], {}).get(pack["arch"], math.inf)
        size = pack["size"] / 10**6
        if size <= limit:
            return ""
        return f"{pack['name']} has {size:.1f} MB; at most {limit} are allowed"

    def arch(self, name: str) -> Arch:
        """Return the arch of this name."""
        return next(arch for arch in self.archs if arch.name == name)

    def cuda_of(self, major: str) -> Cuda:
        """Return the entry of a CUDA major."""
        return next(cuda for cuda in self.cuda if cuda.major == major)


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version such as ``12.4``, for comparison."""
    return tuple(int(part) for part in version.split("."))


def parse(data: dict[str, Any]) -> Table:
    """Make the table from the content of the file."""
    archs = [
        Arch(
            name,
            f"sm_{row['code']}",
            tuple(row["capabilities"]),
            row["min_cuda"],
            row["required"],
            row.get("min_driver", ""),
            tuple(row.get("machines", ())),
        )
        for name, row in data["archs"].items()
    ]
    keys = ("toolkit", "min_toolkit", "min_driver", "image", "packs")
    cuda = [Cuda(major, *(row[key] for key in keys)) for major, row in data["cuda"].items()]
    return Table(
        archs=tuple(sorted(archs, key=lambda arch: int(arch.name.removeprefix("sm")))),
        preference={cc: tuple(names) for cc, names in data["preference"].items()},
        cuda=tuple(sorted(cuda, key=lambda row: int(row.major))),
        record=dict(data["record"]),
        platforms=tuple(Platform(machine, **row) for machine, row in data["platforms"].items()),
        cpu_platforms=tuple(
            CpuPlatform(name, **row) for name, row in data["cpu_platforms"].items()
        ),
        wheel=Limits(**data["wheel"]),
        pythons=tuple(data["pythons"]),
        free_threaded=data["free_threaded"],
        min_torch=data["torch"]["min"],
        compiling_torch=data["torch"]["compiles"],
        torch_python=data["torch"]["newest_python"],
        head_dims=tuple(data["head_dims"]),
    )


def load(path: Path = TABLE) -> Table:
    """Read the table of this source tree."""
    return parse(json.loads(path.read_text(encoding="utf-8")))
