# SPDX-License-Identifier: BSD-3-Clause
"""Real text that every machine has: the sources of Python's standard library."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

VOCABULARY = 256  # one token per byte
SUFFIXES = (".py", ".txt", ".md", ".rst")
# Installed packages and tests differ between machines; the library itself does not.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idle_test"}
_HELD_OUT_SHARE = 10  # one file in ten
_MAX_BYTES = 8 << 20


@dataclass(frozen=True)
class Corpus:
    """Bytes of the training and the held-out files, as 1-D uint8 tensors."""

    train: torch.Tensor
    held_out: torch.Tensor
    files: int
    held_out_files: int

    def batch(self, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
        """Return ``count`` random pieces of training text: int64 (count, length + 1)."""
        starts = torch.randint(len(self.train) - length, (count,), generator=generator)
        return torch.stack([self.train[s : s + length + 1] for s in starts.tolist()]).long()

    def held_out_batches(self, count: int, length: int) -> list[torch.Tensor]:
        """Return ``count`` evenly spaced pieces of held-out text, each int64 (1, length + 1)."""
        stride = (len(self.held_out) - length - 1) // max(count - 1, 1)
        starts = [index * stride for index in range(count)]
        return [self.held_out[s : s + length + 1].long()[None] for s in starts]


def load_corpus(folder: Path | None, minimum: int) -> Corpus:
    """Read the text files below ``folder``; None means the standard library.

    Files are ordered by a hash of their names, which also decides which are held out. So the same
    folder gives the same corpus everywhere. Raises ValueError if either part has fewer than
    ``minimum`` bytes.
    """
    root = folder if folder is not None else Path(sysconfig.get_paths()["stdlib"])
    suffixes = SUFFIXES if folder is not None else (".py",)
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    total = 0
    for digest, path in sorted(_candidates(root, suffixes)):
        if total >= _MAX_BYTES:
            break
        content = path.read_bytes()
        total += len(content)
        parts[digest[0] % _HELD_OUT_SHARE == 0].append(content)
    train, held_out = (_as_tensor(b"".join(parts[held])) for held in (False, True))
    if min(len(train), len(held_out)) < minimum:
        raise ValueError(
            f"{root} has {len(train)} bytes of {'/'.join(suffixes)} text to train on and "
            f"{len(held_out)} held out; both must be at least {minimum}: name another folder "
            "with --text, or use a shorter --context"
        )
    return Corpus(train, held_out, len(parts[False]), len(parts[True]))


def _candidates(root: Path, suffixes: tuple[str, ...]) -> list[tuple[bytes, Path]]:
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT]
        for path in (Path(folder, name) for name in names):
            if path.suffix in suffixes and path.is_file():
                name = path.relative_to(root).as_posix()
                found.append((hashlib.sha256(name.encode()).digest(), path))
    return found


def _as_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)
