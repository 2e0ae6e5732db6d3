# SPDX-License-Identifier: BSD-3-Clause
"""The training of one model, which can be resumed, and its evaluation."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..environment import describe_environment
from .corpora import Corpus
from .probes import Probe, accuracy, make_probes, pieces
from .variants import make_model

_WARM_UP_STEPS = 60
_CONSTANT, _LAST = 0.6, 0.05  # share of the budget at the full learning rate, and its last share
_HELD_OUT_PIECES = 16
_STEPS_BETWEEN_WAITS = 10  # on a GPU, where a synchronization after each step would cost time
_SECONDS_BETWEEN_SAVES = 60.0
_MOST_POINTS = 200  # of the curve of a run


@dataclass(frozen=True)
class Setting:
    """The parameters of a run; ``seconds`` or ``steps`` is its budget."""

    variant: str
    corpus: str
    seed: int
    seconds: float | None
    steps: int | None
    length: int
    batch: int
    layers: int
    width: int
    learning_rate: float

    @property
    def file(self) -> str:
        """The name of its JSON file."""
        budget = f"{self.steps}steps" if self.seconds is None else f"{self.seconds:g}s"
        variant = self.variant.replace("/", "_and_")
        return f"{self.corpus}-{self.length}-{budget}-{variant}-{self.seed}.json"


class Training:
    """A model, its optimizer and its progress."""

    def __init__(self, setting: Setting, corpus: Corpus, device: str) -> None:
        self.setting, self.device, self.about = setting, device, corpus.about
        self.on_gpu = device.startswith("cuda")
        self.text, self.held_out = (t.to(device) for t in (corpus.train, corpus.held_out))
        torch.manual_seed(setting.seed)
        self.model = make_model(setting.variant, setting.width, setting.layers, device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=setting.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=self.on_gpu,
        )
        self.generator = torch.Generator(device).manual_seed(setting.seed)
        self.place = torch.arange(setting.length + 1, device=device)
        self.taken, self.seconds = 0, 0.0
        self.curve: list[tuple[float, int, float]] = []  # seconds, steps, bits of the last steps
        warm_up = self.held_out[self.place].long().expand(setting.batch, -1)
        for _ in range(2):  # load kernels before timing starts
            self._losses(warm_up).mean().backward()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad()

    @property
    def progress(self) -> float:
        """The spent share of the budget."""
        if self.setting.seconds is not None:
            return self.seconds / self.setting.seconds
        assert self.setting.steps is not None
        return self.taken / self.setting.steps

    def precision(self) -> AbstractContextManager[Any]:
        """Return a context of bfloat16 computation on a GPU; parameters are float32."""
        return torch.autocast(self.device.partition(":")[0], torch.bfloat16, self.on_gpu)

    def _losses(self, text: Tensor) -> Tensor:
        """Return the cross entropy (B, N) of bytes (B, N + 1), except the first of each piece."""
        with self.precision():
            logits: Tensor = self.model(text[:, :-1])
        following = text[:, 1:]
        losses = cross_entropy(logits.float().flatten(0, 1), following.flatten(), reduction="none")
        return losses.view_as(following)

    def _step(self, rate: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = rate * min(1.0, (self.taken + 1) / _WARM_UP_STEPS)
        most, shape = len(self.text) - self.setting.length, (self.setting.batch, 1)
        begin = torch.randint(most, shape, generator=self.generator, device=self.device)
        loss = self._losses(self.text[begin + self.place].long()).mean()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.taken += 1
        return loss.detach()

    def advance(self) -> None:
        """Train by a few steps with one synchronization."""
        falling = min(1.0, (1 - self.progress) / (1 - _CONSTANT))
        rate = self.setting.learning_rate * (_LAST + (1 - _LAST) * falling)
        count = _STEPS_BETWEEN_WAITS if self.on_gpu else 1
        if self.setting.steps is not None:
            count = min(count, self.setting.steps - self.taken)
        elif self.setting.seconds is not None and self.taken:
            left = (self.setting.seconds - self.seconds) * self.taken / self.seconds
            count = max(1, min(count, round(left)))
        begun = time.perf_counter()
        losses = [self._step(rate) for _ in range(count)]
        loss = float(torch.stack(losses).mean()) / math.log(2)
        self.seconds += time.perf_counter() - begun
        self.curve.append((round(self.seconds, 3), self.taken, round(loss, 4)))

    @torch.no_grad()
    def evaluate(self, probes: Sequence[Probe]) -> dict[str, Any]:
        """Return bits per byte of held-out text by position, and the accuracy of each probe."""
        length = self.setting.length
        texts = pieces(self.held_out, _HELD_OUT_PIECES, length + 1)
        losses = torch.stack([self._losses(text[None].long())[0] for text in texts])
        bits = losses.mean(0) / math.log(2)
        edges = [0, *(length // part for part in (64, 16, 4, 1))]
        found: dict[str, Any] = {"bits_per_byte": round(float(bits.mean()), 4)}
        found["by_position"] = {
            f"{first}-{past}": round(float(bits[first:past].mean()), 4)
            for first, past in pairwise(edges)
        }

        def predict(text: Tensor) -> Tensor:
            with self.precision():
                logits: Tensor = self.model(text)
            return logits

        accuracies: dict[str, dict[str, float]] = defaultdict(dict)
        for probe in probes:
            accuracies[probe.kind][probe.size] = round(accuracy(predict, probe), 4)
        return {**found, **accuracies}

    def state(self) -> dict[str, Any]:
        """Return the state from which a run resumes."""
        return {
            "setting": asdict(self.setting),
            "corpus": self.about,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "progress": (self.taken, self.seconds, self.curve),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a state.

        Raises:
            ValueError: the state is of a run with another setting or text.
        """
        if state["setting"] != asdict(self.setting) or state["corpus"] != self.about:
            raise ValueError(
                f"the checkpoint of {self.setting.file} is of another run; name another folder "
                "with --output"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.taken, self.seconds, self.curve = state["progress"]


def run(
    setting: Setting,
    corpus: Corpus,
    device: str,
    folder: Path,
    *,
    until: float = math.inf,
    commit: str | None = None,
) -> bool:
    """Train and evaluate, or resume; return whether the run is finished.

    It stops when ``time.monotonic()`` reaches ``until``, with a checkpoint beside its JSON.

    Raises:
        ValueError: the folder has a checkpoint or a JSON of a run with another setting or text.
    """
    path = folder / setting.file
    checkpoint = path.with_suffix(".pt")
    if path.exists():
        done = json.loads(path.read_text())
        if done["setting"] != asdict(setting) or done["corpus"] != corpus.about:
            raise ValueError(f"{path} is of another run; name another folder with --output")
        return True
    training = Training(setting, corpus, device)
    if checkpoint.exists():
        training.restore(torch.load(checkpoint, map_location="cpu"))
    saved = time.monotonic()
    while training.progress < 1:
        now = time.monotonic()
        if now >= until or now - saved > _SECONDS_BETWEEN_SAVES:
            torch.save(training.state(), checkpoint)
            saved = time.monotonic()
        if now >= until:
            return False
        training.advance()
    every = -(-len(training.curve) // _MOST_POINTS)
    result = {
        "setting": asdict(setting),
        "corpus": corpus.about,
        "environment": describe_environment(device, "wall clock of training alone", commit),
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "steps": training.taken,
        "seconds": round(training.seconds, 2),
        **training.evaluate(make_probes(training.held_out, setting.length)),
        "curve": training.curve[::-every][::-1],
    }
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in result.items())
    written = path.with_suffix(".part")
    written.write_text("{\n" + lines + "\n}\n")
    written.replace(path)
    checkpoint.unlink(missing_ok=True)
    return True
