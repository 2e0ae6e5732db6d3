# SPDX-License-Identifier: BSD-3-Clause
"""Time of one attention layer's training step by sequence length."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import nn

from benchmarks.timing import clock_for, in_turns

from .model import ModelConfig
from .progress import Progress


def time_layers(
    config: ModelConfig,
    lengths: dict[str, Sequence[int]],
    each: float = 0.5,
) -> dict[str, dict[int, float]]:
    """Return median seconds of forward and backward of the layer, by attention and length.

    ``lengths`` has the timed lengths of each attention; each timing takes ``each`` seconds.
    """
    layers = {name: config.attention(name) for name in lengths}
    seconds: dict[str, dict[int, float]] = {name: {} for name in layers}
    every = sorted({n for at in lengths.values() for n in at})
    with Progress("timing", len(every)) as progress:
        for length in every:
            x = torch.randn(
                1, length, config.width, generator=torch.Generator().manual_seed(length)
            )
            calls = {
                name: _layer_step(layer, x)
                for name, layer in layers.items()
                if length in lengths[name]
            }
            for name, samples in in_turns(calls, clock_for("cpu").sample, each).items():
                if isinstance(samples, Exception):
                    raise samples
                seconds[name][length] = statistics.median(samples)
            progress.advance(f"length {length}")
    return seconds


def _layer_step(layer: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    parameters = list(layer.parameters())
    return lambda: torch.autograd.grad(layer(x).square().mean(), parameters)
