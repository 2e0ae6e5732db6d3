# SPDX-License-Identifier: BSD-3-Clause
"""The packs that are present: in flash_dmattn's own directory, in other distributions, or named by
a variable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from . import messages
from .facts import OWN_DISTRIBUTION

__all__ = [
    "ENTRY_POINT_GROUP",
    "Candidate",
    "EntryPoint",
    "OpenedPack",
    "arch_name",
    "cuda_name",
    "device_name",
    "entry_point_candidates",
    "forced_candidate",
    "manifest_candidates",
    "own_candidates",
    "without_repetitions",
]

ENTRY_POINT_GROUP = "flash_dmattn.packs"
MANIFEST = "manifest.json"
SCHEMA = 1
OWN_SOURCE = "flash_dmattn"
_DEVICE_NAMES = {1: "cpu", 2: "cuda"}  # DLPack's device types


@dataclass(frozen=True)
class Candidate:
    """One pack that might serve a device.

    Attributes:
        name: such as ``cu13-sm90``.
        path: of its file.
        source: where it was found: ``flash_dmattn``, a distribution and its version, or an
            environment variable.
        distribution: which one to install again if the file is unusable.
        device: the kind of device it is for; None if that is not known because of the defect.
        machine: the host architecture; None if the source does not say.
        cuda: the CUDA version of a GPU pack, such as ``13.0``.
        arch: the architecture of a GPU pack, such as ``sm90``.
        version: of the project, as the source says.
        abi_version: of the pack interface, as the source says.
        sha256: of the file, as the source says; None if it does not.
        size: of the file in bytes, likewise.
        forced: an environment variable names exactly this file.
        defect: why it cannot be used at all; "" if nothing is known against it.
    """

    name: str
    path: str
    source: str
    distribution: str = OWN_DISTRIBUTION
    device: str | None = None
    machine: str | None = None
    cuda: str | None = None
    arch: str | None = None
    version: str | None = None
    abi_version: int | None = None
    sha256: str | None = None
    size: int | None = None
    forced: bool = False
    defect: str = ""

    @property
    def cuda_major(self) -> str | None:
        """The CUDA major of a GPU pack, such as ``13``."""
        return None if self.cuda is None else self.cuda.partition(".")[0]


class OpenedPack(Protocol):
    """What the loader reads of an opened pack (``_core.Pack``)."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def compiler(self) -> str: ...
    @property
    def features(self) -> str: ...
    @property
    def abi_version(self) -> int: ...
    @property
    def device_type(self) -> int: ...
    @property
    def cuda_version(self) -> int: ...
    @property
    def arch(self) -> int: ...


class EntryPoint(Protocol):
    """What the loader reads of an ``importlib.metadata.EntryPoint``."""

    @property
    def name(self) -> str: ...
    @property
    def dist(self) -> Any: ...
    def load(self) -> Any: ...


def device_name(device_type: int) -> str:
    """Return the name of a DLPack device type."""
    return _DEVICE_NAMES.get(device_type, f"device type {device_type}")


def cuda_name(cuda_version: int) -> str | None:
    """Return ``13.0`` for 13000, None for 0."""
    return f"{cuda_version // 1000}.{cuda_version % 1000 // 10}" if cuda_version else None


def arch_name(arch: int) -> str | None:
    """Return ``sm90`` for 90, None for 0."""
    return f"sm{arch}" if arch else None


def own_candidates(directories: Iterable[Path]) -> list[Candidate]:
    """Return the packs in flash_dmattn's own directories (an editable installation has two)."""
    found = []
    for directory in directories:
        packs = directory / "packs"
        if (packs / MANIFEST).is_file():
            found += manifest_candidates(packs, OWN_SOURCE)
    return found


def entry_point_candidates(entry_points: Iterable[EntryPoint]) -> list[Candidate]:
    """Return the packs of other distributions, in order of the entry points' and their names.

    An entry point is a module, or a path, whose directory holds a manifest. One that fails becomes
    a candidate with a defect, since what it would have given is worth knowing.
    """
    found = []
    for entry_point in sorted(entry_points, key=lambda e: (e.name, *_distribution(e))):
        distribution, source = _distribution(entry_point)
        try:
            directory = _directory(entry_point.load())
        except Exception as error:  # a foreign module must not take the others down
            defect = messages.ENTRY_POINT.format(kind=type(error).__name__, error=error)
            found.append(Candidate(entry_point.name, "", source, distribution, defect=defect))
            continue
        found += manifest_candidates(directory, source, distribution)
    return found


def manifest_candidates(
    directory: Path, source: str, distribution: str = OWN_DISTRIBUTION
) -> list[Candidate]:
    """Return the packs of one manifest, or one candidate with a defect if it cannot be used."""
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["schema"] != SCHEMA:
            raise ValueError(
                messages.MANIFEST_SCHEMA.format(found=manifest["schema"], known=SCHEMA)
            )
        return [
            replace(_candidate(row, manifest, directory), source=source, distribution=distribution)
            for row in manifest["packs"]
        ]
    except FileNotFoundError:
        defect = messages.FILE_MISSING
    except KeyError as error:
        defect = messages.MANIFEST_LACKS.format(key=error)
    except (OSError, ValueError, TypeError) as error:
        defect = messages.MANIFEST.format(error=error)
    return [Candidate(MANIFEST, str(path), source, distribution, defect=defect)]


def forced_candidate(path: str, variable: str, open_pack: Callable[[str], OpenedPack]) -> Candidate:
    """Return the pack that a variable names.

    It is opened, since nothing else tells what it was built for.
    """
    candidate = Candidate(Path(path).name, path, variable, forced=True)
    if not Path(path).is_file():
        return replace(candidate, defect=messages.FILE_MISSING)
    try:
        pack = open_pack(path)
    except (ImportError, RuntimeError, OSError) as error:
        return replace(candidate, defect=messages.CANNOT_OPEN.format(error=error))
    return replace(
        candidate,
        name=pack.name,
        device=device_name(pack.device_type),
        cuda=cuda_name(pack.cuda_version),
        arch=arch_name(pack.arch),
        version=pack.version,
        abi_version=pack.abi_version,
    )


def without_repetitions(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Keep the first of those with one file: a distribution may be found twice, and name its own
    folder twice.
    """
    first: dict[object, Candidate] = {}
    for candidate in candidates:
        key = os.path.realpath(candidate.path) if candidate.path else candidate
        first.setdefault(key, candidate)
    return list(first.values())


def _candidate(row: Mapping[str, Any], manifest: Mapping[str, Any], directory: Path) -> Candidate:
    path = directory / row["file"]
    return Candidate(
        name=row["name"],
        path=str(path),
        source=OWN_SOURCE,
        device=row["device"],
        machine=row["machine"],
        cuda=row["cuda"],
        arch=row["arch"],
        version=manifest["version"],
        abi_version=manifest["abi_version"],
        sha256=row.get("sha256"),
        size=row.get("size"),
        defect="" if path.is_file() else messages.FILE_MISSING,
    )


def _distribution(entry_point: EntryPoint) -> tuple[str, str]:
    """Return the distribution, and how to show it as a source."""
    if entry_point.dist is None:
        return entry_point.name, f"entry point {entry_point.name}"
    return entry_point.dist.name, f"{entry_point.dist.name} {entry_point.dist.version}"


def _directory(target: Any) -> Path:
    """Return the directory of a module, of a file, or the directory itself."""
    if isinstance(target, ModuleType):
        paths = list(getattr(target, "__path__", []))
        if paths:
            return Path(paths[0])
        if target.__file__ is None:
            raise TypeError(messages.ENTRY_POINT_FILE.format(name=target.__name__))
        return Path(target.__file__).parent
    if not isinstance(target, (str, os.PathLike)):
        raise TypeError(messages.ENTRY_POINT_TYPE.format(kind=type(target).__name__))
    path = Path(target)
    return path.parent if path.is_file() else path
