# SPDX-License-Identifier: BSD-3-Clause
"""Loss of a language model over the time that it was trained, with dynamic masks and without.

The models are those of `train`, from the same weights and on the same pieces of real text. The
clock stops while a model predicts text that was held out. With several GPUs each model has one of
its own, and they train at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from itertools import cycle
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from . import train
from .cases import Case
from .results import Record, Step
from .text import Corpus, load_corpus

GPU = train.GPU._replace(lengths=(16384,))
CPU = train.CPU._replace(lengths=(2048,))
_LEARNING_RATE, _WARM_UP_STEPS, _MAX_GRADIENT_NORM = 5e-4, 100, 1.0
_HELD_OUT_PIECES = 4


class Point(NamedTuple):
    """How far a training was at a mark: losses are means, in nats per byte."""

    loss: float  # of the steps since the mark before
    held_out_loss: float
    steps: int


class Learner:
    """A model in training on one device."""

    def __init__(self, name: str, case: Case, layers: int, corpus: Corpus) -> None:
        self.case, self.corpus = case, corpus
        self.on_gpu = case.device.startswith("cuda")
        self.model: nn.Module = train.make_model(name, case, layers)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=_LEARNING_RATE, fused=self.on_gpu)
        self.schedule = torch.optim.lr_scheduler.LinearLR(
            self.optimizer, 1 / _WARM_UP_STEPS, total_iters=_WARM_UP_STEPS
        )
        self.generator = torch.Generator().manual_seed(case.seed)
        self.held_out = corpus.held_out_batches(_HELD_OUT_PIECES, case.length)
        self.steps = 0
        self._gradients()  # kernels are loaded before the clock runs
        self.evaluate()

    def loss(self, text: Tensor) -> Tensor:
        """The mean cross entropy of bytes (B, N + 1) but the first of each piece."""
        text = text.to(self.case.device)
        with torch.autocast(self.case.device.partition(":")[0], torch.bfloat16, self.on_gpu):
            logits = self.model(text[:, :-1])
        return cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())

    def _gradients(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(self.corpus.batch(self.case.batch, self.case.length, self.generator))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step(self) -> Tensor:
        """Train by one step; returns the loss before it."""
        loss = self._gradients()
        nn.utils.clip_grad_norm_(self.model.parameters(), _MAX_GRADIENT_NORM)
        self.optimizer.step()
        self.schedule.step()
        self.steps += 1
        return loss

    def train(self, seconds: float) -> float:
        """Train for so long, and at least by one step; returns the mean of the losses."""
        losses: list[Tensor] = []
        begun = time.perf_counter()
        while not losses or time.perf_counter() - begun < seconds:
            losses.append(self.step())
            self.synchronize()  # else steps would be queued ahead of the clock
        return float(torch.stack(losses).mean())

    def evaluate(self) -> float:
        """The mean loss of text that was held out."""
        with torch.no_grad():
            return float(torch.stack([self.loss(text) for text in self.held_out]).mean())

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.case.device)


def learn(name: str, case: Case, layers: int, marks: Sequence[float]) -> list[Point]:
    """Train a model of one method, and tell how far it was at each mark, in seconds."""
    if case.device.startswith("cuda"):
        torch.cuda.set_device(case.device)
    learner = Learner(name, case, layers, load_corpus(None, minimum=case.length + 2))
    points, trained = [], 0.0
    for mark in marks:
        begun = time.perf_counter()
        loss = learner.train(mark - trained)
        trained += time.perf_counter() - begun
        points.append(Point(loss, learner.evaluate(), learner.steps))
    return points


def mark_cases(case: Case, layers: int, who: Sequence[str], marks: Iterable[float]) -> list[Any]:
    """The plain cases of a run, one for each mark."""
    name = f"learn-{case.length / 1024:g}k"
    more = {"contestants": [*who], "layers": layers}
    return [{**asdict(case), **more, "name": f"{name}-{mark:g}", "seconds": mark} for mark in marks]


def step(
    case: Case, layers: int, who: Sequence[str], devices: Sequence[str], marks: Sequence[float]
) -> Step:
    """The training of all methods, on devices in turn, at the same time where there are several."""
    cases = mark_cases(case, layers, who, marks)

    def run() -> Iterator[Record]:
        with ProcessPoolExecutor(len(devices), get_context("spawn")) as pool:
            trainings = [
                pool.submit(learn, name, replace(case, device=device), layers, marks)
                for name, device in zip(who, cycle(devices))
            ]
            for name, training in zip(who, trainings, strict=True):
                for plain, point in zip(cases, training.result(), strict=True):
                    for quantity, value in point._asdict().items():
                        yield _record(plain["name"], name, quantity, value=float(value), samples=1)

    def missing(reason: str) -> list[Record]:
        return [_record(cases[-1]["name"], name, "loss", reason=reason) for name in who]

    return Step(f"learn: {', '.join(who)}", run, missing)


def _record(case: str, name: str, quantity: str, **result: Any) -> Record:
    return Record(case, name, *train.METHODS[name][1:], quantity, **result)
