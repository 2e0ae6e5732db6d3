# SPDX-License-Identifier: BSD-3-Clause
"""The models of the study, which differ only in the attention of their layers."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flash_dmattn import DynamicMaskAttention, ForgettingAttention, flash_dmattn_func

from ..dense_attention import DenseAttention
from ..text import VOCABULARY
from ..train import Block

HEAD_DIM = 64
PRUNE = -16.0
# The fastest on Hopper comes first, so that dense attention is not slower than necessary.
_DENSE = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class Dense(DenseAttention):
    """Attention to all earlier keys, with a rotary embedding."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Attend by PyTorch's kernels."""
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        with sdpa_kernel(_DENSE, set_priority=True) if query.is_cuda else nullcontext():
            out = scaled_dot_product_attention(query, key, value, is_causal=True)
        return out.transpose(1, 2)


class Alibi(DenseAttention):
    """Attention to all earlier keys, with a per-head slope (arXiv:2108.12409) as per-key bias."""

    def key_bias(self, value: Tensor) -> Tensor:
        """Return slope times position."""
        heads = torch.arange(1, self.num_heads + 1, device=value.device)
        slopes = torch.exp2(-8.0 * heads / self.num_heads)
        return (slopes[:, None] * torch.arange(value.shape[1], device=value.device))[None, :, None]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any
    ) -> Tensor:
        """Attend to all keys, with the bias."""
        return DynamicMaskAttention.attend(self, query, key, value, *rest, **options)


class Sliding(DenseAttention):
    """Attention to the last keys, without a bias."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Attend to ``keep_last`` keys."""
        out = flash_dmattn_func(
            query, key, value, is_causal=True, window_size=0, keep_last=self.keep_last
        )
        assert isinstance(out, Tensor)
        return out


# Layers by the form of their names; numbers in names are sizes.
_FORMS: dict[str, Callable[..., nn.Module]] = {
    r"dense": lambda *size: Dense(*size, window_size=None),
    r"dense-unnormed": lambda *size: Dense(*size, window_size=None, qk_norm=False),
    r"alibi": lambda *size: Alibi(*size, window_size=None, rotary_base=None),
    r"sliding-(?P<last>\d+)": lambda *size, last: Sliding(*size, window_size=0, keep_last=last),
    r"top-(?P<top>\d+)": lambda *size, top: DynamicMaskAttention(
        *size, window_size=top, keep_last=0
    ),
    r"last-(?P<last>\d+)\+top-(?P<top>\d+)": lambda *size, last, top: DynamicMaskAttention(
        *size, window_size=top, keep_last=last
    ),
    r"forgetting": lambda *size: ForgettingAttention(*size, prune=None),
    r"forgetting-pruned": lambda *size: ForgettingAttention(*size, prune=PRUNE),
}


def default_names(length: int) -> list[str]:
    """Return the names of the variants, with windows of a sixteenth of the tokens."""
    kept = max(4, length // 16)
    half, quarter = kept // 2, kept // 4
    mixed = f"last-{half}+top-{half}"
    return [
        *("dense", "alibi", f"sliding-{kept}", f"sliding-{quarter}", f"top-{kept}", mixed),
        *(f"last-{quarter}+top-{kept - quarter}", f"last-{kept - quarter}+top-{quarter}"),
        *("forgetting", "forgetting-pruned", f"dense/{mixed}", f"dense/sliding-{kept}"),
    ]


def make_attention(name: str, width: int) -> nn.Module:
    """Return a layer by its name, such as ``last-512+top-512``.

    Raises:
        ValueError: no attention has this name.
    """
    for form, make in _FORMS.items():
        if found := re.fullmatch(form, name):
            sizes = {which: int(size) for which, size in found.groupdict().items()}
            return make(width, width // HEAD_DIM, **sizes)
    known = ", ".join(default_names(16384))
    raise ValueError(f"no attention is called {name!r}; names are like {known}")


def make_model(name: str, width: int, layers: int, device: str) -> nn.Module:
    """Return a language model of bytes; names joined by "/" alternate over its layers."""
    names = cycle(name.split("/"))
    with torch.device(device):
        blocks = [Block(make_attention(next(names), width), width) for _ in range(layers)]
        head = nn.Linear(width, VOCABULARY, bias=False)
        return nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, nn.RMSNorm(width), head)
