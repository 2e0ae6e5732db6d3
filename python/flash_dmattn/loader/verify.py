# SPDX-License-Identifier: BSD-3-Clause
"""Whether the installed files are those that were recorded: ``python -m flash_dmattn --verify``.

Hashes stand in each manifest, for its packs, and in each distribution's RECORD, for all its files.
They are compared when asked for and not at each import: reading every byte of every pack would cost
each process more than all else that the loader does. Both records lie beside what they describe, so
they tell of damage; who made a file is told by its attestation.
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
    """The record of a file: its hash and size."""

    path: str
    record: str  # where it stands, such as manifest.json or RECORD
    algorithm: str  # of the hash, such as sha256
    digest: str  # in hexadecimal digits
    size: int | None  # in bytes; None if the record does not say


class Checked(NamedTuple):
    """A file and what differs from its records; "" if nothing does."""

    path: str
    problem: str


def verify(
    candidates: Iterable[Candidate],
    records: Callable[[str], Iterable[Recorded]] | None = None,
) -> list[Checked]:
    """Compare files with their records: those of flash-dmattn and of each distribution that a
    candidate is from.

    Args:
        candidates: as the loader found them.
        records: gives the records of a distribution; `records_of` if None.
    """
    known = list(candidates)
    said: dict[str, list[Recorded]] = {}
    broken = {}
    for pack in known:
        if pack.device is None:
            broken[pack.path or pack.name] = Checked(pack.path or pack.name, pack.defect)
        elif not pack.forced:
            rows = said.setdefault(os.path.realpath(pack.path), [])
            if pack.sha256 is not None:
                rows.append(Recorded(pack.path, MANIFEST, "sha256", pack.sha256, pack.size))
    for distribution in dict.fromkeys((OWN_DISTRIBUTION, *(c.distribution for c in known))):
        for recorded in (records or records_of)(distribution):
            said.setdefault(os.path.realpath(recorded.path), []).append(recorded)
    return [*broken.values(), *(Checked(path, _problem(path, rows)) for path, rows in said.items())]


def records_of(distribution: str) -> Iterator[Recorded]:
    """Yield what the RECORD of an installed distribution says; nothing where there is none."""
    try:
        files = metadata.distribution(distribution).files or []
    except metadata.PackageNotFoundError:
        return
    for file in files:
        # INSTALLER has the name of what installs, and conda puts its own in place of pip's.
        if file.hash is not None and file.name != "INSTALLER":
            # RECORD has base64 without its padding.
            digest = base64.urlsafe_b64decode(file.hash.value + "=" * (-len(file.hash.value) % 4))
            path = str(file.locate())
            yield Recorded(path, "RECORD", file.hash.mode, digest.hex(), file.size)


def passed(checked: Sequence[Checked]) -> bool:
    """Say whether something was compared, and nothing differed."""
    return bool(checked) and not any(row.problem for row in checked)


def render(checked: Sequence[Checked]) -> str:
    """Return the outcome as text."""
    lines = [f"  {row.path}: {row.problem}" for row in checked if row.problem]
    verdict = "passed" if passed(checked) else "FAILED"
    return "\n".join([f"{len(checked)} files compared", *lines, f"verification {verdict}"])


def as_json(checked: Sequence[Checked]) -> dict[str, Any]:
    """Return the outcome in types that JSON has."""
    files = [{"path": row.path, "problem": row.problem or None} for row in checked]
    return {"passed": passed(checked), "files": files}


def _problem(path: str, said: Sequence[Recorded]) -> str:
    """Return the first difference of a file from what is recorded of it."""
    digest = functools.cache(functools.partial(_digest, path))  # one reading for equal algorithms
    try:
        size = Path(path).stat().st_size
        for _, record, algorithm, expected, expected_size in said:
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
    return "" if said else messages.NOT_RECORDED


def _digest(path: str, algorithm: str) -> str:
    digest = hashlib.new(algorithm)
    with Path(path).open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
