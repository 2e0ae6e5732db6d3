# SPDX-License-Identifier: BSD-3-Clause
"""Stands in for a release: describes a folder of assets as GitHub's API does, and serves it.

An index server, such as pypiserver, makes its own pages, but a rehearsal tests those of
`release.index`.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from release.distributions import sha256

JSON_TYPE = "application/vnd.pypi.simple.v1+json"


class Handler(SimpleHTTPRequestHandler):
    """Serves the JSON form of a page to clients that accept it (PEP 691)."""

    def do_GET(self) -> None:
        if self.path.endswith("/") and JSON_TYPE in self.headers.get("Accept", ""):
            self.path += "index.json"
        super().do_GET()

    def guess_type(self, path: object) -> str:
        if str(path).endswith("/index.json"):
            return JSON_TYPE
        return str(super().guess_type(path))  # type: ignore[arg-type]

    def log_message(self, *arguments: object) -> None:
        self.server.requests.append(self.path)  # type: ignore[attr-defined]


class Server(ThreadingHTTPServer):
    """Records the requested paths."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Serve a folder on this machine's loopback address."""
    with Server(folder) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def local_release(folder: Path, tag: str, base_url: str) -> dict[str, Any]:
    """Describe a release whose assets are the files of a folder, served at an address."""
    return {
        "tag_name": tag,
        "draft": False,
        "prerelease": False,
        "assets": [
            {
                "name": path.name,
                "browser_download_url": f"{base_url}/{path.name}",
                "digest": f"sha256:{sha256(path)}",
                "size": path.stat().st_size,
                "created_at": datetime.datetime.fromtimestamp(
                    int(path.stat().st_mtime), datetime.timezone.utc
                ).strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
            for path in sorted(folder.iterdir())
        ],
    }
