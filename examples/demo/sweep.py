# SPDX-License-Identifier: BSD-3-Clause
"""Time of one attention layer's training step against the length of the sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from flash_dmattn import DynamicMaskAttention
from flash_dmattn.bench.timing import CpuClock, time_interleaved

from .model import ModelConfig, make_attention
from .progress import Progress


def time_layers(
    config: ModelConfig,
    attentions: dict[str, type[DynamicMaskAttention]],
    lengths: dict[str, Sequence[int]],
    repeats: int = 5,
) -> dict[str, dict[int, float]]:
    """Median seconds of forward and backward of the layer, by attention and sequence length.

    ``lengths`` says for each attention which lengths it is timed at.
    """
    layers = {name: make_attention(config, kind) for name, kind in attentions.items()}
    first = next(iter(layers.values()))
    for layer in layers.values():
        layer.load_state_dict(first.state_dict())
    seconds: dict[str, dict[int, float]] = {name: {} for name in layers}
    calls_in_all = (repeats + 1) * sum(len(at) for at in lengths.values())
    with Progress("timing", calls_in_all) as progress:
        for length in sorted({n for at in lengths.values() for n in at}):
            x = torch.randn(
                1, length, config.width, generator=torch.Generator().manual_seed(length)
            )
            calls = {
                name: _layer_step(layer, x)
                for name, layer in layers.items()
                if length in lengths[name]
            }
            done = partial(progress.advance, f"length {length}")
            timings = time_interleaved(calls, CpuClock(), repeats, done)
            for name, timing in timings.items():
                seconds[name][length] = timing.median
    return seconds


def _layer_step(layer: DynamicMaskAttention, x: torch.Tensor) -> Callable[[], object]:
    parameters = list(layer.parameters())
    return lambda: torch.autograd.grad(layer(x).square().mean(), parameters)
