# SPDX-License-Identifier: BSD-3-Clause
"""Progress: a bar in a terminal, otherwise an occasional line."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm

_LINES = 6  # number of lines in a log instead of a bar


class Progress:
    """Counts ``total`` pieces of work on standard error; use it as a context manager."""

    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = total
        self._done = 0
        self._start = time.perf_counter()
        terminal = sys.stderr.isatty()
        self._bar = (
            tqdm(total=total, desc=title, unit="step", dynamic_ncols=True) if terminal else None
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, note: str = "") -> None:
        """Count one finished piece; ``note`` is shown beside the count."""
        self._done += 1
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update()
        elif self._done * _LINES // self._total > (self._done - 1) * _LINES // self._total:
            elapsed = time.perf_counter() - self._start
            line = f"{self._title}: {self._done}/{self._total}, {elapsed:.0f} s  {note}"
            print(line.rstrip(), file=sys.stderr, flush=True)
