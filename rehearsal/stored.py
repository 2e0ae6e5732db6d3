# SPDX-License-Identifier: BSD-3-Clause
"""Stands in for GitHub's artifact service: answers the requests that GitHub's library makes.

Requests are Twirp's, in JSON. Contents are transferred as Azure's block blobs.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

SERVICE = "/twirp/github.actions.results.api.v1.ArtifactService/"
# The claims of the token. The library reads only the scope; nothing checks the signature.
CLAIMS = base64.urlsafe_b64encode(b'{"scp": "Actions.Results:1:1"}').decode().rstrip("=")
TOKEN = f"none.{CLAIMS}.none"


@dataclass
class Artifact:
    """One artifact: its blocks in the order of their arrival, and its complete content."""

    number: int
    name: str
    blocks: dict[str, bytes] = field(default_factory=dict)
    content: bytes = b""
    digest: str = ""


class Server(ThreadingHTTPServer):
    """Keeps the artifacts of one run at a time."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.artifacts: dict[str, Artifact] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def variables(self) -> dict[str, str]:
        """Return the variables with which jobs find the server."""
        return {"ACTIONS_RESULTS_URL": self.url, "ACTIONS_RUNTIME_TOKEN": TOKEN}

    def clear(self) -> None:
        """Remove the artifacts of a run."""
        self.artifacts.clear()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        answer = self.answer(self.path.removeprefix(SERVICE), json.loads(self.rfile.read(size)))
        if answer is None:
            self.reply(409, json.dumps({"msg": "an artifact with this name exists"}).encode())
        else:
            self.reply(200, json.dumps(answer).encode())

    def answer(self, method: str, request: dict[str, Any]) -> dict[str, Any] | None:
        """Return the answer to a request; None if the artifact exists already."""
        artifacts, name = self.server.artifacts, request.get("name", "")
        if method == "CreateArtifact":
            if name in artifacts:
                return None
            artifacts[name] = Artifact(len(artifacts) + 1, name)
            return {"ok": True, "signed_upload_url": self.blob(artifacts[name])}
        if method == "FinalizeArtifact":
            artifacts[name].digest = request.get("hash", "")
            return {"ok": True, "artifact_id": str(artifacts[name].number)}
        if method == "GetSignedArtifactURL":
            return {"signed_url": self.blob(artifacts[name])}
        wanted, number = request.get("name_filter"), request.get("id_filter")
        listed = [
            described(artifact)
            for artifact in artifacts.values()
            if wanted in (None, artifact.name) and number in (None, str(artifact.number))
        ]
        return {"artifacts": listed}

    def blob(self, artifact: Artifact) -> str:
        return f"{self.server.url}blob/{artifact.number}?signed=no"

    def stored(self) -> Artifact:
        """Return the artifact of the requested address."""
        number = int(urlsplit(self.path).path.rpartition("/")[2])
        return next(a for a in self.server.artifacts.values() if a.number == number)

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        query, artifact = parse_qs(urlsplit(self.path).query), self.stored()
        if query.get("comp") == ["block"]:
            artifact.blocks[query["blockid"][0]] = content
        elif query.get("comp") == ["blocklist"]:
            order = re.findall(r"<Latest>([^<]+)</Latest>", content.decode())
            artifact.content = b"".join(artifact.blocks[block] for block in order)
        else:
            artifact.content = content
        self.reply(201, b"")

    def do_GET(self) -> None:
        self.reply(200, self.stored().content, "application/zip")

    def reply(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Log nothing: the library logs its requests."""


def described(artifact: Artifact) -> dict[str, Any]:
    return {
        "workflow_run_backend_id": "1",
        "workflow_job_run_backend_id": "1",
        "database_id": str(artifact.number),
        "name": artifact.name,
        "size": str(len(artifact.content)),
        "created_at": "2030-01-31T00:00:00Z",
        "digest": artifact.digest,
    }


@contextlib.contextmanager
def storing() -> Iterator[Server]:
    """Serve on this machine's loopback address."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
