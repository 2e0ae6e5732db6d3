# SPDX-License-Identifier: BSD-3-Clause
"""mkdocs' hooks for each page: pages look as on GitHub, and fetch nothing from other hosts."""

from __future__ import annotations

import logging
import re
from html.parser import HTMLParser
from typing import Any

# A child of mkdocs' logger, so that a strict build counts its warnings.
_log = logging.getLogger("mkdocs.hooks.docs")


class _Fetched(HTMLParser):
    """Collects the addresses that a browser fetches to show a page, without links for readers."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the sources of scripts and pictures, and the addresses of link elements."""
        named = dict(attrs)
        address = named.get("href" if tag == "link" else "src")
        if tag == "link" and named.get("rel") in {"canonical", "prev", "next", "alternate"}:
            return
        if tag != "a" and address is not None:
            self.addresses.append(address)


def fetched_from_elsewhere(html: str) -> list[str]:
    """Return the addresses on other hosts that a browser fetches to show a page."""
    parser = _Fetched()
    parser.feed(html)
    return [a for a in parser.addresses if "://" in a or a.startswith("//")]


def on_page_content(html: str, *, page: Any, config: Any, files: Any) -> str:
    """Unescape pipes in table cells: GitHub needs the escape, mkdocs shows it."""
    return re.sub(r"<td.*?</td>", lambda cell: cell[0].replace(r"\|", "|"), html, flags=re.DOTALL)


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Warn about addresses that are fetched from other hosts; a strict build then fails."""
    for address in fetched_from_elsewhere(output):
        _log.warning("%s makes browsers fetch %s", page.file.src_uri, address)
    return output
