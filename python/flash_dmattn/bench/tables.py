# SPDX-License-Identifier: BSD-3-Clause
"""Tables as plain text and as Markdown."""

from __future__ import annotations

from dataclasses import dataclass

from tabulate import tabulate


@dataclass(frozen=True)
class Table:
    """A title, the heads of the columns, rows of as many cells, and remarks below.

    Without rows the heads are not shown either.
    """

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """Columns in line: the first to the left, the others to the right."""
        align = ("left", *["right"] * (len(self.heads) - 1))
        body = tabulate(self.rows, self.heads, colalign=align, disable_numparse=True)
        return "\n".join([self.title, *([body] if self.rows else []), *self.notes])

    def markdown(self) -> str:
        """A table of GitHub's Markdown below the title in bold."""
        lines = [self.heads, ("---",) * len(self.heads), *self.rows] if self.rows else []
        body = [f"| {' | '.join(line)} |" for line in lines]
        notes = [f"* {note}" for note in self.notes]
        parts = [[f"**{self.title}**"], body, notes]
        return "\n\n".join("\n".join(part) for part in parts if part)
