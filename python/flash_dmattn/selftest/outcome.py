# SPDX-License-Identifier: BSD-3-Clause
"""The comparisons of the self-test, their tolerances, and its outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

# The largest difference, relative to the largest exact value or 1. The 16-bit tolerances are about
# 8 rounding steps of the dtype, because sums over keys are float32 until the end.
TOLERANCES: Mapping[str, float] = {"float32": 1e-5, "float16": 8e-3, "bfloat16": 6e-2}

BATCH, QUERIES, KEYS, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 2, 70, 90, 4, 2, 40, 16


@dataclass(frozen=True)
class Comparison:
    """One result of one problem: its largest error, and the tolerance."""

    device: str
    case: str
    dtype: str
    result: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance; NaN is not."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Outcome:
    """All comparisons, and why devices were not tested."""

    comparisons: tuple[Comparison, ...]
    untested: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether there are comparisons, all devices were tested, and all results agree."""
        return bool(self.comparisons) and not self.untested and not self.failures

    @property
    def failures(self) -> list[Comparison]:
        """The comparisons whose error exceeds the tolerance."""
        return [comparison for comparison in self.comparisons if not comparison.passed]

    def as_json(self) -> dict[str, Any]:
        """Return the outcome in JSON types."""
        rows = [{**asdict(c), "passed": c.passed} for c in self.comparisons]
        return {"passed": self.passed, "comparisons": rows, "untested": list(self.untested)}

    def __str__(self) -> str:
        """Show one line for each problem with its worst result, and the verdict."""
        lines = ["self-test: largest error of out, lse and gradients against float64"]
        worst: dict[tuple[str, str, str], Comparison] = {}
        for row in self.comparisons:
            key = (row.device, row.dtype, row.case)
            if key not in worst or not row.error <= worst[key].error:
                worst[key] = row
        for row in worst.values():
            verdict = "ok" if row.passed else "WRONG"
            lines.append(
                f"  {row.device:7} {row.dtype:9} {row.case:16} {row.result:5} "
                f"{row.error:.1e} of {row.tolerance:.0e}  {verdict}"
            )
        lines += [f"  not tested: {reason}" for reason in self.untested]
        return "\n".join([*lines, f"self-test {'passed' if self.passed else 'FAILED'}"])
