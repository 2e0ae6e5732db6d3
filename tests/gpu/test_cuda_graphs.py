# SPDX-License-Identifier: BSD-3-Clause
"""Captured calls: replays after their inputs have changed in place, and capture of a first call."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from drawn.calls import assert_same_bits
from flash_dmattn import IntervalMask, dynamic_mask
from support import HALF_TYPES

from .kinds import KINDS, Draw


def test_replays_read_what_the_tensors_hold(kind: str, gpu: str, seed: int) -> None:
    """Forward and backward of every kind; with a window, the selection is captured too."""
    dtype = HALF_TYPES[seed % 2]
    contents = [KINDS[kind](Draw(seed, dtype, values=n)).to(gpu) for n in range(3)]
    wanted = [call.results(deterministic=True) for call in contents]
    call = KINDS[kind](Draw(seed, dtype)).to(gpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call.results(deterministic=True)
    # The first contents again at the end: a replay must leave nothing behind.
    for new, want in zip([*contents, contents[0]], [*wanted, wanted[0]], strict=True):
        call.copy_(new)
        graph.replay()
        assert_same_bits(got, want)


@pytest.mark.parametrize("rows", [False, True])
def test_replayed_selection(rows: bool, gpu: str, seed: int) -> None:
    draw = Draw(seed, torch.float16)
    queries, keys = draw.size(2, 100), draw.size(100, 2000)
    biases = [draw.randn(2, 2, queries if rows else 1, keys).to(gpu) for _ in range(3)]
    bias, graph = biases[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = dynamic_mask(bias, 50, True, query_length=queries)
    for new in biases:
        bias.copy_(new)
        graph.replay()
        want = dynamic_mask(new, 50, True, query_length=queries, backend="reference")
        if isinstance(got, IntervalMask):
            assert torch.equal(got.to_bool(queries), want.to_bool(queries))
        else:
            assert torch.equal(got, want)


FIRST_USE = """
import torch
import flash_dmattn

def make(seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randn(2, 300, heads, 64, dtype=torch.bfloat16, device="cuda", generator=generator)
        for heads in (4, 2, 2)
    ] + [torch.randn(2, 2, 300, device="cuda", generator=generator)]

def run(query, key, value, bias):
    leaves = [t.detach().requires_grad_() for t in (query, key, value, bias)]
    out = flash_dmattn.flash_dmattn_func(
        *leaves[:3], attn_bias=leaves[3], is_causal=True, window_size=40, deterministic=True
    )
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]

tensors = make(1)
# Of torch's own first uses, some cannot be captured.
query = tensors[0].detach().requires_grad_()
torch.autograd.grad((query @ query.mT).float().square().sum(), query)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    got = run(*tensors)
for seed in (1, 2):
    for tensor, new in zip(tensors, make(seed)):
        tensor.copy_(new)
    graph.replay()
    for one, other in zip(got, run(*make(seed)), strict=True):
        assert torch.equal(one, other)
"""


@pytest.mark.usefixtures("gpu")
def test_first_use_inside_of_a_capture() -> None:
    """The pack and its kernels are loaded during stream capture."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_USE], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
