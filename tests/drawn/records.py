# SPDX-License-Identifier: BSD-3-Clause
"""The file of a run: the checked seeds, the target and device, and the failures."""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import flash_dmattn
from flash_dmattn import loader
from support import Target

from .workers import Outcome

# The facts that a continued run must share with the earlier one.
FIXED = ("commit", "target", "device", "small", "many", "lists", "first_seed")


@dataclasses.dataclass
class Record:
    """The results of the seeds from `first_seed` up to `next_seed`, and of some later ones."""

    facts: dict[str, Any]
    next_seed: int
    seconds: float = 0.0
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    failures: list[Outcome] = dataclasses.field(default_factory=list)
    launched: Counter[str] = dataclasses.field(default_factory=Counter)  # cases for each kernel
    ahead: dict[int, Outcome] = dataclasses.field(default_factory=dict)

    @property
    def done(self) -> int:
        """The number of finished seeds before the first gap."""
        return self.next_seed - int(self.facts["first_seed"])

    @property
    def wrong(self) -> int:
        return len(self.failures)

    def add(self, outcome: Outcome) -> None:
        """Record the outcome of a seed; outcomes come in any order."""
        self.ahead[outcome.seed] = outcome
        while (outcome := self.ahead.pop(self.next_seed, None)) is not None:
            self.next_seed += 1
            self.counts[outcome.kind] = self.counts.get(outcome.kind, 0) + 1
            self.launched.update(outcome.launched)
            if outcome.kind not in ("right", "refused"):
                self.failures.append(outcome)

    def write(self, path: Path) -> None:
        """Write the state for a later run: no seed after a gap."""
        content = {
            **self.facts,
            "next_seed": self.next_seed,
            "cases": self.done,
            "seconds": round(self.seconds, 1),
            "counts": self.counts,
            "failures": [outcome._replace(launched=())._asdict() for outcome in self.failures],
            "launched": dict(sorted(self.launched.items())),
        }
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(content, indent=1) + "\n")
        partial.replace(path)

    @classmethod
    def read(cls, path: Path, facts: dict[str, Any]) -> Record:
        """Read a file to continue; SystemExit if its facts differ."""
        content = json.loads(path.read_text())
        other = [
            f"{name} {content.get(name)!r}, now {facts[name]!r}"
            for name in FIXED
            if content.get(name) != facts[name]
        ]
        if other:
            raise SystemExit(f"error: {path} cannot be continued: it has {'; '.join(other)}")
        failures = [Outcome(**failure) for failure in content["failures"]]
        return cls(
            {**content, **facts},
            content["next_seed"],
            content["seconds"],
            content["counts"],
            failures,
            Counter(content["launched"]),
        )


def facts_of(
    target: Target, *, small: bool, many: bool, lists: bool, first_seed: int, commit: str | None
) -> dict[str, Any]:
    """Return the facts of a run."""
    pack = Path(loader.pack_for(target.device).path).name if target.is_pack else None
    return {
        "commit": commit or _commit(),
        "version": flash_dmattn.__version__,
        "target": str(target),
        "device": device_name(target.device),
        "pack": pack,
        "torch": torch.__version__,
        "small": small,
        "many": many,
        "lists": lists,
        "first_seed": first_seed,
    }


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return models[0] if models else platform.machine()


def _commit() -> str:
    """Return the commit of the sources, with a mark for local changes."""
    asked = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
    ]
    done = subprocess.run([*asked, "--exclude=*"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
