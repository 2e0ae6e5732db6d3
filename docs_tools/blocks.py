# SPDX-License-Identifier: BSD-3-Clause
"""Generated blocks of Markdown pages, between <!-- NAME --> and <!-- end NAME -->."""

from __future__ import annotations

import re
from collections.abc import Mapping

_BEGIN = re.compile(r"^<!-- (?!end )([\w-]+) -->\n", re.MULTILINE)


class MarkerError(ValueError):
    """A page has the start marker of a block without its end marker."""


def blocks(page: str) -> dict[str, str]:
    """Return the contents of a page's blocks by name.

    Raises:
        MarkerError: a block does not end.
    """
    found = {}
    for begin in _BEGIN.finditer(page):
        name = begin[1]
        body, end, _ = page[begin.end() :].partition(f"<!-- end {name} -->")
        if not end:
            raise MarkerError(f"<!-- {name} --> has no <!-- end {name} -->")
        found[name] = body
    return found


def filled(page: str, bodies: Mapping[str, str]) -> str:
    """Return the page with these contents in its blocks; other blocks stay unchanged.

    Raises:
        MarkerError: a block does not end.
    """
    for name, old in blocks(page).items():
        if name in bodies:
            begin, end = f"<!-- {name} -->\n", f"<!-- end {name} -->"
            page = page.replace(begin + old + end, begin + bodies[name] + end, 1)
    return page
