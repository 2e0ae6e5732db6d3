# SPDX-License-Identifier: BSD-3-Clause
"""Probes of what a byte model retrieves from its context: texts whose end can be looked up."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_SAMPLES = 4
_MOST_QUERIES = 32
_HEX = "0123456789abcdef"
_PAIRS = (4, 16, 64, 256, 1024)
_DEPTHS = (0.1, 0.5, 0.9)


class Probe(NamedTuple):
    """Texts (S, N + 1), uint8, and which of their bytes are scored."""

    kind: str  # copy, recall or needle
    size: str  # the distance, the number of pairs, or the needle's depth
    text: Tensor
    scored: Tensor


def pieces(text: Tensor, count: int, length: int) -> Tensor:
    """Return ``count`` evenly spaced pieces (count, length) of a text."""
    last = len(text) - length
    starts = torch.tensor([n * last // max(1, count - 1) for n in range(count)], device=text.device)
    return text[starts[:, None] + torch.arange(length, device=text.device)]


def make_probes(held_out: Tensor, length: int) -> list[Probe]:
    """Return texts, equal for every model: random insertions in held-out text."""
    draw = random.Random(0)
    hosts = pieces(held_out, _SAMPLES, length + 1)
    probes = []
    shortest = length // 64
    for distance in (shortest, length // 16, length // 4, length * 3 // 4):
        copied = min(96, shortest)
        probes.append(_planted("copy", str(distance), hosts, _copies(draw, copied, distance)))
    for pairs in _PAIRS:
        if 10 * (pairs + min(pairs, _MOST_QUERIES)) <= length:
            probes.append(_planted("recall", str(pairs), hosts, _recalls(draw, pairs)))
    for depth in _DEPTHS:
        placed = _needles(draw, depth, length + 1)
        probes.append(_planted("needle", f"{depth:.0%}", hosts, placed))
    return probes


def accuracy(predict: Callable[[Tensor], Tensor], probe: Probe) -> float:
    """Return the share of the scored bytes to which a model gives the highest probability.

    ``predict`` returns logits (1, N, 256) of int64 (1, N).
    """
    right = []
    for text, scored in zip(probe.text, probe.scored, strict=True):
        best = predict(text[None, :-1].long())[0].argmax(-1)
        right.append((best == text[1:])[scored[1:]])
    return torch.cat(right).float().mean().item()


# Insertions: bytes, their begin counted from the end, and the scored spans.
_Planted = list[tuple[bytes, int, list[tuple[int, int]]]]


def _planted(kind: str, size: str, hosts: Tensor, drawn: Iterator[_Planted]) -> Probe:
    text, scored = hosts.clone(), torch.zeros_like(hosts, dtype=torch.bool)
    for row, marks, planted in zip(text, scored, drawn, strict=False):
        for content, back, spans in planted:
            begin = len(row) - back
            row[begin : begin + len(content)] = torch.tensor(list(content), dtype=torch.uint8)
            for first, past in spans:
                marks[begin + first : begin + past] = True
    return Probe(kind, size, text, scored)


def _word(draw: random.Random, letters: str, length: int) -> str:
    return "".join(draw.choices(letters, k=length))


def _copies(draw: random.Random, length: int, distance: int) -> Iterator[_Planted]:
    """Yield a string that repeats ``distance`` bytes later, at the end; a third of it is a hint."""
    while True:
        key = _word(draw, _HEX, length).encode()
        yield [(key, length + distance, []), (key, length, [(length // 3, length)])]


def _recalls(draw: random.Random, pairs: int) -> Iterator[_Planted]:
    """Yield lines such as ``kxvb=81fa``; some repeat at the end, and their values are scored."""
    while True:
        names: set[str] = set()
        while len(names) < pairs:
            names.add(_word(draw, string.ascii_lowercase, 4))
        lines = [f"{name}={_word(draw, _HEX, 4)}\n" for name in sorted(names)]
        draw.shuffle(lines)
        asked = draw.sample(lines, min(pairs, _MOST_QUERIES))
        content = "".join(lines + asked).encode()
        first = [10 * (pairs + n) + 5 for n in range(len(asked))]
        yield [(content, len(content), [(begin, begin + 4) for begin in first])]


def _needles(draw: random.Random, depth: float, length: int) -> Iterator[_Planted]:
    """Yield a line far back whose value is scored at the end."""
    while True:
        name, value = "\nSECRET_TOKEN = '", _word(draw, _HEX, 8)
        back = min(length, max(int(length * (1 - depth)), 2 * len(name) + 20))
        asked = f"{name}{value}".encode()
        yield [
            (f"{name}{value}'\n".encode(), back, []),
            (asked, len(asked), [(len(name), len(asked))]),
        ]
