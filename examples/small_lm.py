# SPDX-License-Identifier: BSD-3-Clause
"""Shared parts of the examples: a small byte-level language model, its text, and its device."""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flash_dmattn import AttentionCache, DynamicMaskAttention

VOCABULARY = 256  # one token per byte
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Modules of Python's standard library: text that every machine has; the last one is held out.
_TEXTS = ("argparse.py", "ast.py", "doctest.py", "inspect.py", "shutil.py", "tarfile.py")


class Block(nn.Module):
    """Attention and feed-forward, each with a pre-norm and a residual connection."""

    def __init__(self, attention: nn.Module, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = attention
        self.feed_forward_norm = nn.RMSNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        x = x + self.attention(self.attention_norm(x), **options)
        hidden: Tensor = self.feed_forward(self.feed_forward_norm(x))
        return x + hidden


class LanguageModel(nn.Module):
    """Predicts the next byte; the caller provides the attention layers."""

    def __init__(self, attentions: list[nn.Module], width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(attention, width) for attention in attentions)
        self.norm = nn.RMSNorm(width)

    def forward(
        self, tokens: Tensor, caches: list[AttentionCache] | None = None, **options: Any
    ) -> Tensor:
        """Return logits of integers (B, N), or of packed (total,) with cu_seqlens given."""
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            cached = {} if caches is None else {"cache": caches[index]}
            x = block(x, **cached, **options)
        logits: Tensor = self.norm(x) @ self.embedding.weight.T
        return logits

    def loss(self, tokens: Tensor, targets: Tensor, **options: Any) -> Tensor:
        """Return the mean cross entropy in nats per byte; targets of -100 do not count."""
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            logits = self(tokens, **options)
        return cross_entropy(logits.float().flatten(0, -2), targets.flatten())


def kept_keys(window: int) -> dict[str, Any]:
    """Return the settings of a layer that keeps ``window`` keys, half of them the last ones."""
    return {"window_size": window // 2, "keep_last": window - window // 2}


def make_model(options: argparse.Namespace) -> LanguageModel:
    """Return a model of DynamicMaskAttention layers on the device."""
    torch.manual_seed(options.seed)
    attentions: list[nn.Module] = [
        DynamicMaskAttention(options.width, 4, 2, **kept_keys(options.window))
        for _ in range(options.layers)
    ]
    return LanguageModel(attentions, options.width).to(DEVICE)


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all examples."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--window", type=int, default=32, help="keys that a query keeps")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64, help="a multiple of 8")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def load_text() -> tuple[Tensor, Tensor]:
    """Return the training bytes and the held-out bytes, int64."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    *train, held_out = (
        torch.frombuffer(bytearray((folder / name).read_bytes()), dtype=torch.uint8).long()
        for name in _TEXTS
    )
    return torch.cat(train), held_out


def random_pieces(text: Tensor, count: int, length: int) -> tuple[Tensor, Tensor]:
    """Return ``count`` random pieces (count, length) of a text, and the bytes that follow each."""
    starts = torch.randint(len(text) - length, (count,)).tolist()
    pieces = torch.stack([text[start : start + length + 1] for start in starts]).to(DEVICE)
    return pieces[:, :-1], pieces[:, 1:]


def entropy(text: Tensor) -> float:
    """Return nats per byte of a text for a model that knows only the byte frequencies."""
    share = torch.bincount(text, minlength=VOCABULARY).double() / len(text)
    return float(torch.special.entr(share).sum())
