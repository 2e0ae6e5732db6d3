# SPDX-License-Identifier: BSD-3-Clause
"""Training steps of a language model, with dynamic masks and with dense causal attention.

Both models have the same projections, norms, rotary embedding and feed-forward layers. The one with
dynamic masks also learns biases, and selects keys by them. Parameters are float32, computation on a
GPU is in bfloat16 by autocast, and a step is forward, backward and AdamW. Both are measured in
eager mode, and with each block compiled as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

from flash_dmattn import DynamicMaskAttention

from .cases import Case
from .dense_attention import DenseAttention
from .entrants import ALL_KEYS, TOP_KEYS_OF_EACH_QUERY
from .memory import peak_extra_memory
from .results import Record, Step
from .text import VOCABULARY
from .timing import Clock, summary

# Modes of running a model, with the prefixes of their cases' names.
MODES = {"eager": "train", "compiled": "train-compiled"}


class Setting(NamedTuple):
    """A model, and the number of tokens in a step, which determines the batch for each length."""

    shape: Case
    layers: int
    tokens: int
    lengths: tuple[int, ...]
    modes: tuple[str, ...] = tuple(MODES)

    def case(self, length: int, mode: str = "eager") -> Case:
        """Return the attention problem of a layer at a length."""
        batch = max(1, self.tokens // length)
        name = f"{MODES[mode]}-{length / 1024:g}k"
        return replace(self.shape, name=name, batch=batch, length=length)

    def cases(self) -> list[tuple[Case, str]]:
        """Return each length in each mode."""
        return [(self.case(length, mode), mode) for mode in self.modes for length in self.lengths]


GPU = Setting(
    Case("", "bfloat16", heads=16, kv_heads=4, head_dim=64, window=1024),
    layers=8,
    tokens=65536,
    lengths=(2048, 4096, 16384, 65536),
)
CPU = Setting(Case("", heads=4, kv_heads=2, head_dim=32, window=128), 2, 2048, (512, 2048))


class Block(nn.Module):
    """Attention and SwiGLU (arXiv:2002.05202), each with a pre-norm and a residual, as in Llama."""

    def __init__(self, attention: nn.Module, width: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = attention
        self.gate = nn.Linear(width, 3 * width, bias=False)
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        states = self.feed_forward_norm(x)
        down: Tensor = self.down(silu(self.gate(states)) * self.up(states))
        return x + down


METHODS: dict[str, tuple[type[DynamicMaskAttention], str, str]] = {
    "flash_dmattn": (DynamicMaskAttention, "ours", TOP_KEYS_OF_EACH_QUERY),
    "dense": (DenseAttention, "baseline", ALL_KEYS),
}


def make_model(name: str, case: Case, layers: int, mode: str = "eager") -> nn.Module:
    """Return a model of one method on the case's device, with random weights in float32.

    In compiled mode a graph break in a block is an error.
    """
    torch.manual_seed(case.seed)
    width = case.heads * case.head_dim
    attention = METHODS[name][0]
    sizes = (width, case.heads, case.kv_heads)
    with torch.device(case.device):
        blocks = [
            Block(attention(*sizes, window_size=case.window, keep_last=0), width)
            for _ in range(layers)
        ]
        head = nn.Linear(width, VOCABULARY, bias=False)
        model = nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, nn.RMSNorm(width), head)
    if mode == "compiled":
        torch.compiler.reset()  # makes sizes constants of the compiled code
        for block in blocks:
            block.compile(fullgraph=True, dynamic=False)
    return model


def make_step(name: str, case: Case, layers: int, mode: str = "eager") -> Callable[[], Tensor]:
    """Return a function that trains a model by one step on random tokens, and returns the loss."""
    model = make_model(name, case, layers, mode)
    on_gpu = case.device.startswith("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu)
    shape = (case.batch, case.length + 1)
    tokens = torch.randint(VOCABULARY, shape, device=case.device)

    def step() -> Tensor:
        with torch.autocast(case.device.partition(":")[0], torch.bfloat16, enabled=on_gpu):
            logits = model(tokens[:, :-1])
        loss = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def steps(
    setting: Setting, contestants: Sequence[str], clock: Clock, seconds: float
) -> Iterator[Step]:
    """Yield the steps that measure each method at each length."""
    for case, mode in setting.cases():
        for name in contestants:
            record = partial(Record, case.name, name, *METHODS[name][1:])
            make = partial(make_step, name, case, setting.layers, mode)
            run = partial(_measure, record, make, case.device, clock, seconds)
            missing = partial(lambda record, reason: [record("train_step", reason=reason)], record)
            yield Step(f"{case.name}: {name}", run, missing)


def _measure(
    record: Callable[..., Record],
    make: Callable[[], Callable[[], Tensor]],
    device: str,
    clock: Clock,
    seconds: float,
) -> Iterator[Record]:
    step = make()
    step()  # creates the optimizer's state and compiles
    yield record("memory_train", value=float(peak_extra_memory(step, device)), samples=1)
    yield record("train_step", **summary(clock.sample(step, seconds)))
