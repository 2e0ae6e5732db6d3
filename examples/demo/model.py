# SPDX-License-Identifier: BSD-3-Clause
"""A small decoder around an attention layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy, silu

from .attention import ATTENTIONS


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model."""

    vocabulary: int
    layers: int = 2
    width: int = 256
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 512

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    def attention(self, name: str) -> nn.Module:
        """Return an attention layer of this model."""
        return ATTENTIONS[name](self.width, self.heads, self.kv_heads)


class SwiGLU(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: torch.Tensor = self.down(silu(gate) * up)
        return out


class Block(nn.Module):
    """Attention and feed-forward, each with a pre-norm and a residual connection."""

    def __init__(self, config: ModelConfig, attention: str) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.attention = config.attention(attention)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.feed_forward = SwiGLU(config.width, config.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        hidden: torch.Tensor = self.feed_forward(self.feed_forward_norm(x))
        return x + hidden


class LanguageModel(nn.Module):
    """Predicts the next byte; the input embedding is also the output projection."""

    def __init__(self, config: ModelConfig, attention: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=config.width**-0.5)

    def loss(self, text: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of int64 (B, N + 1) text, in nats per byte."""
        x = self.embedding(text[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.embedding.weight.T
        return cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
