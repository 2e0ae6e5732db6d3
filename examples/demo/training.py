# SPDX-License-Identifier: BSD-3-Clause
"""Training of several models in turns on the same batches, with the cost of each step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from benchmarks.memory import peak_extra_memory

from .model import LanguageModel
from .progress import Progress

_WARM_UP_STEPS = 10
_MAX_GRADIENT_NORM = 1.0
# Memory is measured in a few steps, after the buffers that persist between steps exist.
_MEMORY_STEPS = range(2, 5)


@dataclass
class Run:
    """One model in training: its losses (nats per byte), seconds and extra bytes per step."""

    model: LanguageModel
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)

    @property
    def step_seconds(self) -> float:
        """Median over the steps, without the first, which starts threads and fills caches."""
        return sorted(self.seconds[1:] or self.seconds)[len(self.seconds[1:]) // 2]

    @property
    def peak_memory(self) -> int:
        return max(self.memory)

    def step(self, text: torch.Tensor) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model.loss(text)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _MAX_GRADIENT_NORM)
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())

    def evaluate(self, texts: Iterable[torch.Tensor]) -> None:
        with torch.no_grad():
            losses = [self.model.loss(text).item() for text in texts]
        self.held_out.append(sum(losses) / len(losses))


def make_run(model: LanguageModel, learning_rate: float) -> Run:
    """Return a model with its AdamW optimizer."""
    return Run(model, torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01))


def train(
    runs: dict[str, Run],
    batches: list[torch.Tensor],
    held_out: list[torch.Tensor],
    learning_rate: float,
) -> None:
    """Train each run by one step per batch, in turns, so that all have the same conditions."""
    for run in runs.values():
        run.evaluate(held_out)
    with Progress("training", len(batches)) as progress:
        for step, text in enumerate(batches):
            for run in runs.values():
                for group in run.optimizer.param_groups:
                    group["lr"] = learning_rate * _schedule(step, len(batches))
                _step(run, step, len(batches), text)
            progress.advance("loss " + " / ".join(f"{r.losses[-1]:.4f}" for r in runs.values()))
    for run in runs.values():
        run.evaluate(held_out)


def _step(run: Run, step: int, steps: int, text: torch.Tensor) -> None:
    if step in _MEMORY_STEPS or steps <= _MEMORY_STEPS.start:
        run.memory.append(peak_extra_memory(lambda: run.step(text)))
    else:
        run.step(text)


def _schedule(step: int, steps: int) -> float:
    """Return the share of the learning rate: linear warm-up, then half a cosine down to a tenth."""
    warm_up = min((step + 1) / min(_WARM_UP_STEPS, steps), 1.0)
    return warm_up * (0.55 + 0.45 * math.cos(math.pi * step / steps))
