# SPDX-License-Identifier: BSD-3-Clause
"""The packs that are present: in flash_dmattn's own directory, in other distributions, or named by
an environment variable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path, PureWindowsPath
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import messages
from .facts import OWN_DISTRIBUTION

if TYPE_CHECKING:
    from flash_dmattn._core import Pack

ENTRY_POINT_GROUP = "flash_dmattn.packs"
MANIFEST = "manifest.json"
SCHEMA = 1
_DEVICE_NAMES = {1: "cpu", 2: "cuda"}  # DLPack's device types


@dataclass(frozen=True)
class Candidate:
    """One pack that might serve a device, as described by its source. A field is None if the source
    omits it, or a defect prevents reading it.
    """

    name: str  # such as cu13-sm90
    path: str  # of the file
    source: str  # flash_dmattn, a distribution and its version, or an environment variable
    distribution: str = OWN_DISTRIBUTION  # to reinstall if the file is unusable
    device: str | None = None  # the supported kind of device
    machine: str | None = None  # the host architecture
    cuda: str | None = None  # the CUDA version of a GPU pack, such as 13.0
    arch: str | None = None  # the architecture of a GPU pack, such as sm90
    version: str | None = None  # of the project
    abi_version: int | None = None  # of the pack interface
    sha256: str | None = None
    size: int | None = None  # in bytes
    forced: bool = False  # an environment variable names exactly this file
    defect: str = ""  # why it cannot be used; "" if no defect is known

    @property
    def cuda_major(self) -> str | None:
        """The CUDA major version of a GPU pack, such as ``13``."""
        return None if self.cuda is None else self.cuda.partition(".")[0]


def own_candidates(directories: Iterable[Path]) -> list[Candidate]:
    """Return the packs in flash_dmattn's own directories (an editable installation has two)."""
    folders = (directory / "packs" for directory in directories)
    found = (manifest_candidates(f, "flash_dmattn") for f in folders if (f / MANIFEST).is_file())
    return [candidate for candidates in found for candidate in candidates]


def entry_point_candidates(entry_points: Iterable[EntryPoint]) -> list[Candidate]:
    """Return the packs of other distributions, ordered by entry point and distribution names.

    An entry point is a module or a path whose directory holds a manifest. One that fails becomes a
    candidate with a defect, so that reports show it.
    """
    found = []
    for entry_point in sorted(entry_points, key=lambda e: (e.name, *_distribution(e))):
        distribution, source = _distribution(entry_point)
        try:
            directory = _directory(entry_point.load())
        except Exception as error:  # a foreign module must not break the others
            defect = messages.ENTRY_POINT.format(kind=type(error).__name__, error=error)
            found.append(Candidate(entry_point.name, "", source, distribution, defect=defect))
            continue
        found += manifest_candidates(directory, source, distribution)
    return found


def manifest_candidates(
    directory: Path, source: str, distribution: str = OWN_DISTRIBUTION
) -> list[Candidate]:
    """Return the packs of one manifest, or one candidate with a defect if it is unusable."""
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        found = manifest["schema"]
        if found != SCHEMA:
            raise ValueError(messages.MANIFEST_SCHEMA.format(found=found, known=SCHEMA))
        rows = manifest["packs"]
        common = {key: manifest[key] for key in ("version", "abi_version")}
        common |= {"source": source, "distribution": distribution}
        return [_candidate(row, directory, common) for row in rows]
    except FileNotFoundError:
        defect = messages.FILE_MISSING
    except KeyError as error:
        defect = messages.MANIFEST_LACKS.format(key=error)
    except (OSError, ValueError, TypeError) as error:
        defect = messages.MANIFEST.format(error=error)
    return [Candidate(MANIFEST, str(path), source, distribution, defect=defect)]


def forced_candidate(path: str, variable: str, open_pack: Callable[[str], Pack]) -> Candidate:
    """Return the pack that an environment variable names.

    It is opened, because only the file tells what it was built for.
    """
    candidate = Candidate(Path(path).name, path, variable, forced=True)
    if not Path(path).is_file():
        return replace(candidate, defect=messages.FILE_MISSING)
    try:
        return replace(candidate, **_table(open_pack(path)))
    except (ImportError, RuntimeError, OSError) as error:
        return replace(candidate, defect=messages.CANNOT_OPEN.format(error=error))


def difference(candidate: Candidate, pack: Pack) -> str:
    """Return how an opened pack differs from its source's description; "" if it does not."""
    stated, found = vars(candidate), _table(pack)
    words = {"device": "device", "cuda": "CUDA", "arch": "arch", "version": "version"}
    return "; ".join(
        messages.DIFFERENCE.format(what=word, said=stated[key], found=found[key])
        for key, word in words.items()
        if stated[key] != found[key]
    )


def without_repetitions(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Keep the first candidate of each file: a distribution may be found twice, and may list its
    own folder twice.
    """
    first: dict[object, Candidate] = {}
    for candidate in candidates:
        key = os.path.realpath(candidate.path) if candidate.path else candidate
        first.setdefault(key, candidate)
    return list(first.values())


def _table(pack: Pack) -> dict[str, Any]:
    """Return the description in an opened pack, by the field names of a candidate."""
    cuda = pack.cuda_version
    return {
        "name": pack.name,
        "device": _DEVICE_NAMES.get(pack.device_type, f"device type {pack.device_type}"),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        "arch": f"sm{pack.arch}" if pack.arch else None,
        "version": pack.version,
        "abi_version": pack.abi_version,
    }


def _candidate(row: Mapping[str, Any], directory: Path, common: Mapping[str, Any]) -> Candidate:
    file = row["file"]
    # Windows path rules include the separators and drives of all systems.
    if file in ("", "..") or PureWindowsPath(file).name != file:
        raise ValueError(messages.MANIFEST_FILE.format(name=row["name"], file=file))
    path = directory / file
    stated = {key: row[key] for key in ("name", "device", "machine", "cuda", "arch")}
    stated |= {key: row.get(key) for key in ("sha256", "size")}
    defect = "" if path.is_file() else messages.FILE_MISSING
    return Candidate(path=str(path), **stated, **common, defect=defect)


def _distribution(entry_point: EntryPoint) -> tuple[str, str]:
    """Return the distribution's name, and its text as a source."""
    if entry_point.dist is None:
        return entry_point.name, f"entry point {entry_point.name}"
    return entry_point.dist.name, f"{entry_point.dist.name} {entry_point.dist.version}"


def _directory(target: Any) -> Path:
    """Return the directory of a module or of a file, or the directory itself."""
    if isinstance(target, ModuleType):
        paths = list(getattr(target, "__path__", []))
        if not paths and target.__file__ is None:
            raise TypeError(messages.ENTRY_POINT_FILE.format(name=target.__name__))
        return Path(paths[0]) if paths else Path(str(target.__file__)).parent
    if not isinstance(target, (str, os.PathLike)):
        raise TypeError(messages.ENTRY_POINT_TYPE.format(kind=type(target).__name__))
    path = Path(target)
    return path.parent if path.is_file() else path
