# SPDX-License-Identifier: BSD-3-Clause
"""A small decoder in the style of the Doge family, whose attention bias is learned from values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy, silu, softplus

from .attention import Attention


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; ``window`` is how many keys each query keeps."""

    vocabulary: int
    window: int
    layers: int = 2
    width: int = 256
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 512

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learned scale."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def rotate(x: torch.Tensor, base: float = 10000.0) -> torch.Tensor:
    """Rotary position embedding of a (B,N,heads,D) tensor, half against half."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[1], device=x.device)[:, None, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class DynamicMaskAttention(nn.Module):
    """Grouped-query attention with bias = A * softplus(dt_proj(V)): one per key and kv head."""

    def __init__(self, config: ModelConfig, attend: Attention) -> None:
        super().__init__()
        self.config = config
        self.attend = attend
        kv_width = config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, kv_width, bias=False)
        self.v_proj = nn.Linear(config.width, kv_width, bias=False)
        self.dt_proj = nn.Linear(kv_width, config.kv_heads, bias=False)
        self.A = nn.Parameter(torch.ones(config.kv_heads))
        self.o_proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        per_head = (*x.shape[:2], -1, self.config.head_dim)
        value = self.v_proj(x)
        bias = self.A * softplus(self.dt_proj(value))  # (B,N,Hk)
        out = self.attend(
            rotate(self.q_proj(x).view(per_head)),
            rotate(self.k_proj(x).view(per_head)),
            value.view(per_head),
            bias.transpose(1, 2).unsqueeze(2),
            self.config.window,
        )
        return self.o_proj(out.flatten(2))


class SwiGLU(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(silu(gate) * up)


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added after."""

    def __init__(self, config: ModelConfig, attend: Attention) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width)
        self.attention = DynamicMaskAttention(config, attend)
        self.feed_forward_norm = RMSNorm(config.width)
        self.feed_forward = SwiGLU(config.width, config.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class LanguageModel(nn.Module):
    """Predicts the next byte; the input embedding is also the output projection."""

    def __init__(self, config: ModelConfig, attend: Attention) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=config.width**-0.5)

    def loss(self, text: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy, in nats per byte, of int64 (B, N + 1) text."""
        x = self.embedding(text[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.embedding.weight.T
        return cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
