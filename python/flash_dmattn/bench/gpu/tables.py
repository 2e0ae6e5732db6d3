# SPDX-License-Identifier: BSD-3-Clause
"""Tables as plain text and as Markdown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A title, the heads of the columns, rows of as many cells, and remarks below."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """Columns in line: the first to the left, numbers to the right."""
        lines = [self.heads, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.heads))]
        body = [
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([self.title, *(f"  {line}" for line in [*body, *self.notes])])

    def markdown(self) -> str:
        """A table of GitHub's Markdown below the title in bold."""
        lines = [self.heads, ("---",) * len(self.heads), *self.rows]
        body = [f"| {' | '.join(line)} |" for line in lines]
        notes = [f"* {note}" for note in self.notes]
        return "\n".join([f"**{self.title}**", "", *body, *([""] if notes else []), *notes])
