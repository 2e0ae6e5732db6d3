# SPDX-License-Identifier: BSD-3-Clause
"""Tables as plain text and as Markdown."""

from __future__ import annotations

from dataclasses import dataclass

from tabulate import tabulate


@dataclass(frozen=True)
class Table:
    """A title, the heads of the columns, rows of as many cells, and remarks below."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """Columns in line: the first to the left, the others to the right."""
        return "\n".join([self.title, self._body("simple"), *self.notes])

    def markdown(self) -> str:
        """A table of GitHub's Markdown below the title in bold."""
        notes = "".join(f"\n* {note}" for note in self.notes)
        return f"**{self.title}**\n\n{self._body('pipe')}" + (f"\n{notes}" if notes else "")

    def _body(self, form: str) -> str:
        align = ("left", *["right"] * (len(self.heads) - 1))
        body: str = tabulate(
            self.rows, self.heads, tablefmt=form, colalign=align, disable_numparse=True
        )
        return body
