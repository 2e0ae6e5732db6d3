# SPDX-License-Identifier: BSD-3-Clause
"""Comparison of the installed files with their records: ``python -m flash_dmattn --verify``.

Each manifest has hashes of its packs. Each distribution's RECORD has hashes of all its files. They
are compared on request and not at import: reading all bytes of all packs would cost each process
more than everything else in the loader. Both records are next to the files, so they detect damage
only; the attestation of a file proves its origin.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from . import messages
from .candidates import MANIFEST, Candidate
from .facts import OWN_DISTRIBUTION

_BLOCK = 1 << 20


class Recorded(NamedTuple):
    """A recorded hash and size of a file."""

    path: str
    record: str  # source of the record, such as manifest.json or RECORD
    algorithm: str  # of the hash, such as sha256
    digest: str  # in hexadecimal digits
    size: int | None  # in bytes; None if not recorded


class Checked(NamedTuple):
    """A file and its difference from its records; "" if there is none."""

    path: str
    problem: str


def verify(
    candidates: Iterable[Candidate],
    records: Callable[[str], Iterable[Recorded]] | None = None,
) -> list[Checked]:
    """Compare files with the records of flash-dmattn and of each distribution of a candidate.

    Args:
        candidates: as found by the loader.
        records: returns the records of a distribution; `records_of` if None.
    """
    known = list(candidates)
    records_by_path: dict[str, list[Recorded]] = {}
    broken = {}
    for pack in known:
        if pack.device is None:
            broken[pack.path or pack.name] = Checked(pack.path or pack.name, pack.defect)
        elif not pack.forced:
            rows = records_by_path.setdefault(os.path.realpath(pack.path), [])
            if pack.sha256 is not None:
                rows.append(Recorded(pack.path, MANIFEST, "sha256", pack.sha256, pack.size))
    for distribution in dict.fromkeys((OWN_DISTRIBUTION, *(c.distribution for c in known))):
        for recorded in (records or records_of)(distribution):
            records_by_path.setdefault(os.path.realpath(recorded.path), []).append(recorded)
    return [
        *broken.values(),
        *(Checked(path, _problem(path, rows)) for path, rows in records_by_path.items()),
    ]


def records_of(distribution: str) -> Iterator[Recorded]:
    """Yield the entries of an installed distribution's RECORD; nothing if it has none."""
    try:
        files = metadata.distribution(distribution).files or []
    except metadata.PackageNotFoundError:
        return
    for file in files:
        # INSTALLER names the installer, and conda replaces pip's name by its own.
        if file.hash is not None and file.name != "INSTALLER":
            # RECORD has base64 without its padding.
            digest = base64.urlsafe_b64decode(file.hash.value + "=" * (-len(file.hash.value) % 4))
            path = str(file.locate())
            yield Recorded(path, "RECORD", file.hash.mode, digest.hex(), file.size)


def passed(checked: Sequence[Checked]) -> bool:
    """Say whether at least one file was compared, and none differs."""
    return bool(checked) and not any(row.problem for row in checked)


def render(checked: Sequence[Checked]) -> str:
    """Return the outcome as text."""
    lines = [f"  {row.path}: {row.problem}" for row in checked if row.problem]
    verdict = "passed" if passed(checked) else "FAILED"
    return "\n".join([f"{len(checked)} files compared", *lines, f"verification {verdict}"])


def as_json(checked: Sequence[Checked]) -> dict[str, Any]:
    """Return the outcome in JSON types."""
    files = [{"path": row.path, "problem": row.problem or None} for row in checked]
    return {"passed": passed(checked), "files": files}


def _problem(path: str, records: Sequence[Recorded]) -> str:
    """Return the first difference of a file from its records."""
    digest = functools.cache(functools.partial(_digest, path))  # one read per algorithm
    try:
        size = Path(path).stat().st_size
        for _, record, algorithm, expected, expected_size in records:
            if expected_size not in (None, size):
                return messages.RESIZED.format(found=size, record=record, recorded=expected_size)
            if digest(algorithm) != expected:
                return messages.CHANGED.format(
                    algorithm=algorithm, found=digest(algorithm), record=record, recorded=expected
                )
    except FileNotFoundError:
        return messages.FILE_MISSING
    except OSError as error:
        return messages.UNREADABLE.format(error=error)
    return "" if records else messages.NOT_RECORDED


def _digest(path: str, algorithm: str) -> str:
    digest = hashlib.new(algorithm)
    with Path(path).open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
