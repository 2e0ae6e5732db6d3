# SPDX-License-Identifier: BSD-3-Clause
"""Text of installed packages: their Python sources, and prose, mostly their docstrings."""

from __future__ import annotations

import hashlib
import platform
import re
import sysconfig
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

# "python" is the standard library. torch needs sympy and networkx.
PACKAGES = ("python", "torch", "transformers", "numpy", "triton", "sympy", "networkx")
CORPORA = ("code", "prose")
_SUFFIXES = {"code": (".py",), "prose": (".py", ".md", ".rst", ".txt")}
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__"}
_MOST_BYTES = 400_000  # of a file; larger ones are generated tables
_HELD_OUT = 20  # one folder in 20 is held out
_DOCSTRING = re.compile(rb':\s*\n\s+r?"""(.+?)"""', re.DOTALL)
_SHORTEST_DOCSTRING = 200


class Corpus(NamedTuple):
    """Training and held-out bytes, 1-D uint8, and their sources."""

    train: Tensor
    held_out: Tensor
    about: dict[str, Any]


def load(name: str, packages: tuple[str, ...] = PACKAGES) -> Corpus:
    """Read the text of the installed packages.

    Whole folders are held out, because files of a folder resemble each other. Repeated texts are
    skipped. Files of a folder are adjacent.
    """
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    versions, files = {}, 0
    seen: set[bytes] = set()
    for package in packages:
        root = _root(package)
        if root is None:
            continue
        versions[package] = _version(package)
        for path in _files(root, _SUFFIXES[name]):
            content = path.read_bytes()
            texts = [content]
            if name == "prose" and path.suffix == ".py":
                texts = [t for t in _DOCSTRING.findall(content) if len(t) >= _SHORTEST_DOCSTRING]
            folder = f"{package}/{path.parent.relative_to(root).as_posix()}"
            is_held_out = hashlib.sha256(folder.encode()).digest()[0] % _HELD_OUT == 0
            new = [text for text in texts if text not in seen]
            seen.update(new)
            parts[is_held_out] += new
            files += 1
    train, held_out = (b"\n\n".join(parts[held]) for held in (False, True))
    about = {
        "name": name,
        "packages": versions,
        "files": files,
        "train_bytes": len(train),
        "held_out_bytes": len(held_out),
        "sha256": hashlib.sha256(train + held_out).hexdigest(),
    }
    return Corpus(_as_tensor(train), _as_tensor(held_out), about)


def _root(package: str) -> Path | None:
    if package == "python":
        return Path(sysconfig.get_paths()["stdlib"])
    found = util.find_spec(package)
    places = found.submodule_search_locations if found else None
    return Path(next(iter(places))) if places else None


def _version(package: str) -> str:
    return platform.python_version() if package == "python" else metadata.version(package)


def _files(root: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    for path in sorted(root.rglob("*")):
        inside = path.relative_to(root).parts
        if path.suffix not in suffixes or not _LEFT_OUT.isdisjoint(inside):
            continue
        if path.is_file() and 0 < path.stat().st_size <= _MOST_BYTES:
            yield path


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)
