# SPDX-License-Identifier: BSD-3-Clause
"""A progress bar in a terminal, a line for each step elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

_WIDTH = 24


class Progress:
    """Says on standard error which of ``total`` steps begins; use it as a context manager."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._begun = 0
        self._start = time.perf_counter()
        self._terminal = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._terminal:
            self._show(self._total, "\n")

    def advance(self, note: str) -> None:
        """The next step begins."""
        if self._terminal:
            self._show(self._begun, f" {note[:80]}\x1b[K")
        else:
            elapsed = time.perf_counter() - self._start
            step = f"{self._begun + 1}/{self._total}"
            print(f"{step:>7} {elapsed:6.1f} s  {note}", file=sys.stderr, flush=True)
        self._begun += 1

    def _show(self, done: int, rest: str) -> None:
        filled = _WIDTH * done // max(self._total, 1)
        bar = "#" * filled + "." * (_WIDTH - filled)
        print(f"\r[{bar}] {done}/{self._total}{rest}", end="", file=sys.stderr, flush=True)
