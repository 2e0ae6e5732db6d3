# SPDX-License-Identifier: BSD-3-Clause
"""Drawn forget gates with sums that are exact in any order, by a pack and by the formula."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_dmattn import forgetting_bias
from flash_dmattn.forgetting_formula import plain_results
from support import Target

from .source import Source, strided

SHARE = 5  # one of this many drawn calls also draws gates


def check_gates(seed: int, target: Target) -> None:
    """Raise AssertionError if the bias of drawn gates, its intervals or its gradient is wrong."""
    source = Source(seed)
    packed, prune = source.chance(0.3), source.choice([None, -2.0, -16.0])
    batch, heads = (1 if packed else source.choice([1, 2, 7])), source.choice([1, 3, 16])
    length = source.choice([1, 100, 1023, 1024, 1025, 5000, source.integer(1, 20_000)])
    steps = source.integers(-source.choice([1, 8, 64]), 1, batch, heads, length)
    gates = (steps / 64).to(source.choice([torch.float32, torch.bfloat16, torch.float64]))
    padding = cu_seqlens = None
    if packed:
        gates, inner = gates[0], [source.integer(0, length) for _ in range(source.integer(0, 4))]
        cu_seqlens = torch.tensor([0, *sorted(inner), length], dtype=torch.int32)
    elif source.chance(0.3):
        padding = source.kept((batch, length), 0.8)
    gates = strided(source, gates)
    dbias = source.integers(-16, 17, *gates.shape[:-1], 1, length) / 8

    def results(device: str, *, by_pack: bool) -> tuple[Tensor, ...]:
        leaf, *others = (None if t is None else t.to(device) for t in (gates, padding, cu_seqlens))
        assert leaf is not None
        leaf.requires_grad_()
        if by_pack:
            bias, mask = forgetting_bias(leaf, prune, others[1], padding=others[0])
            ends = () if mask is None else (mask.start, mask.end)
        else:
            bias, *ends = plain_results(leaf, others[0], others[1], prune)
        gradient = torch.autograd.grad(bias, leaf, dbias.to(device, bias.dtype))
        found = (bias.detach().double(), *gradient, *ends[: 0 if prune is None else 2])
        return tuple(tensor.cpu() for tensor in found)

    names = ("bias", "gradient of the gates", "start", "end")
    given = f"gates {gates.dtype} {tuple(gates.shape)}, prune={prune}, lengths {cu_seqlens}"
    pairs = zip(results(target.device, by_pack=True), results("cpu", by_pack=False), strict=True)
    for name, (got, want) in zip(names, pairs, strict=False):
        assert torch.equal(got, want), f"{name} of {given}"
