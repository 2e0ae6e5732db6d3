# SPDX-License-Identifier: BSD-3-Clause
"""The numbers of a run, and their JSON format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

SCHEMA = 2
# A sweep with fewer cases is shown as one table per case.
_LEAST_OF_A_SWEEP = 3


@dataclass(frozen=True)
class Record:
    """A quantity of a contestant in a case: a median with its quartiles, or why it is missing.

    ``mask`` names the contestant's mask; only numbers with the same mask are comparable.
    ``difference`` is that of the results from the first contestant with the same mask.
    """

    case: str
    contestant: str
    role: str
    mask: str
    quantity: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    samples: int = 0
    difference: float | None = None
    reason: str | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """The identity of the number in a run."""
        return (self.case, self.contestant, self.quantity)

    def plain(self) -> dict[str, Any]:
        """Return the fields for JSON, without unknown values and insignificant digits."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return {n: float(f"{v:.6g}") if isinstance(v, float) else v for n, v in known.items()}

    def rounded(self) -> Record:
        """Return the record with the precision of a file, so that both show the same numbers."""
        return Record(**self.plain())


class Step(NamedTuple):
    """A part of a run that is measured separately."""

    title: str
    run: Callable[[], Iterable[Record]]
    missing: Callable[[str], Iterable[Record]]  # makes records from the reason of a failure


@dataclass
class Results:
    """A run: environment, quantities and cases, and the records. Seconds and bytes."""

    environment: dict[str, Any]
    quantities: dict[str, str]
    cases: dict[str, dict[str, Any]]
    records: list[Record] = field(default_factory=list)

    @property
    def values(self) -> dict[tuple[str, str, str], float]:
        """The numbers by case, contestant and quantity."""
        return {record.key: record.value for record in self.records if record.value is not None}

    @property
    def sweeps(self) -> dict[str, list[str]]:
        """Cases that differ in one number, by their name without its last part."""
        found: dict[str, list[str]] = {}
        for name in self.cases:
            found.setdefault(name.rpartition("-")[0], []).append(name)
        return {
            sweep: names
            for sweep, names in found.items()
            if len(names) >= _LEAST_OF_A_SWEEP and not sweep.startswith("dense")
        }

    @property
    def machine(self) -> str:
        """The machine of the run, in a few words."""
        threads = self.environment["threads"]
        on_cpu = f"{self.environment['cpu']}, {threads} thread{'' if threads == 1 else 's'}"
        return str(self.environment["gpu"] or on_cpu)

    @property
    def commit(self) -> str:
        """The measured commit and the date."""
        name, dash, state = str(self.environment["commit"] or "unknown").partition("-")
        return f"commit {name[:7]}{dash}{state}, {self.environment['date'][:10]}"

    @property
    def peers(self) -> str:
        """The versions of the installed optional contestants."""
        known = self.environment.get("peers") or {}
        return ", ".join(f"{name} {version}" for name, version in known.items())

    @property
    def heading(self) -> str:
        """The environment of the run in two lines; the note is a third."""
        where = self.environment
        pack = where["pack"]
        kernels = f"{pack['name']} [{pack['features']}]" if pack else "none (plain PyTorch)"
        driver = (where.get("state_before") or {}).get("driver", "unknown")
        versions = f"Python {where['python']}"
        if where["gpu"]:
            versions = f"driver {driver}, CUDA {where['cuda']}, cuDNN {where['cudnn']}"
        versions = ", ".join(filter(None, (versions, self.peers)))
        lines = [
            f"flash_dmattn {where['flash_dmattn']}, kernel pack {kernels}, "
            f"commit {where['commit'] or 'unknown'}",
            f"{self.machine}, torch {where['torch']}, {versions}, {where['date']}",
        ]
        return "\n".join([*lines, *([where["note"]] if where.get("note") else [])])

    def write(self, path: Path | None) -> None:
        """Write the JSON to a path, if given, with one entry of a list or a table per line."""
        if path is None:
            return
        parts = [f' "schema": {SCHEMA}']
        for name in ("environment", "quantities", "cases"):
            entries = getattr(self, name).items()
            lines = [f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in entries]
            parts.append(f' "{name}": {{\n' + ",\n".join(lines) + "\n }")
        records = ",\n".join(f"  {json.dumps(record.plain())}" for record in self.records)
        parts.append(f' "records": [\n{records}\n ]')
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".part")
        unfinished.write_text("{\n" + ",\n".join(parts) + "\n}\n")
        unfinished.replace(path)  # atomic, so that a killed run leaves the last complete file


def read(path: Path) -> Results:
    """Return the content of a results file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a results file.
    """
    try:
        written = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    schema = written.get("schema") if isinstance(written, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"{path}: schema is {schema!r}; results have {SCHEMA}")
    records = [Record(**fields) for fields in written["records"]]
    return Results(written["environment"], written["quantities"], written["cases"], records)


def short_reason(error: BaseException) -> str:
    """Return an exception's first two sentences in one line: torch's texts continue with advice."""
    text = " ".join(str(error).split()) or type(error).__name__
    return " ".join(re.split(r"(?<=\.) (?=[A-Z])", text)[:2])[:200]
