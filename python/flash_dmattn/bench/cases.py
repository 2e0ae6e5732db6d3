# SPDX-License-Identifier: BSD-3-Clause
"""The problems that are measured, their inputs, and the ratios they are held to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

Pass = Literal["forward", "forward_backward"]
PASSES: tuple[Pass, ...] = ("forward", "forward_backward")


@dataclass(frozen=True)
class Targets:
    """Least ratios baseline / ours; None where nothing is promised. Below 1, ours may be slower."""

    forward: float | None = None
    forward_backward: float | None = None
    memory: float | None = None

    def time(self, which: Pass) -> float | None:
        return self.forward if which == "forward" else self.forward_backward


# What the project promises for its cpu kernels, and only for the default masked shape and float32.
MASKED_TARGETS = Targets(forward=8.0, forward_backward=6.0, memory=10.0)
DENSE_TARGETS = Targets(forward=1 / 2.5, forward_backward=1 / 2.5)
NO_TARGETS = Targets()


@dataclass(frozen=True)
class Case:
    """One attention problem. ``window`` is None for dense attention, which has no bias either."""

    name: str
    dtype: str = "float32"
    batch: int = 1
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    length: int = 4096
    window: int | None = None
    causal: bool = True
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads != 0:
            raise ValueError(
                f"heads is {self.heads}; it must be a multiple of kv_heads, {self.kv_heads}"
            )

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype is {self.dtype!r}; it must name a torch dtype")
        return dtype


@dataclass(frozen=True)
class Inputs:
    """query, grad_out (B,N,H,D); key, value (B,N,Hk,D); bias (B,Hk,1,N), None for dense cases."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None
    grad_out: torch.Tensor


def make_inputs(case: Case) -> Inputs:
    """Normal random tensors, the same for every contestant and in every process."""
    generator = torch.Generator(device=case.device).manual_seed(case.seed)

    def normal(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator, device=case.device)
        return values.to(case.torch_dtype)

    queries = (case.batch, case.length, case.heads, case.head_dim)
    keys = (case.batch, case.length, case.kv_heads, case.head_dim)
    return Inputs(
        query=normal(*queries),
        key=normal(*keys),
        value=normal(*keys),
        bias=None if case.window is None else normal(case.batch, case.kv_heads, 1, case.length),
        grad_out=normal(*queries),
    )


def masked_case(shape: Case, dtype: str) -> Case:
    """``shape`` with its window and a trainable bias, in ``dtype``."""
    return replace(shape, name=f"masked, causal, {dtype}", dtype=dtype, causal=True)


def dense_case(shape: Case, dtype: str, causal: bool) -> Case:
    """``shape`` without window and bias, in ``dtype``."""
    name = f"dense, {'causal' if causal else 'not causal'}, {dtype}"
    return replace(shape, name=name, dtype=dtype, window=None, causal=causal)


def targets_for(case: Case) -> Targets:
    """The promises that apply to ``case``: those of the default shape on the CPU in float32."""
    standard = Case(
        name=case.name,
        window=None if case.window is None else 256,
        causal=case.causal,
        seed=case.seed,
    )
    if case != standard:
        return NO_TARGETS
    return DENSE_TARGETS if case.window is None else MASKED_TARGETS
