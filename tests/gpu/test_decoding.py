# SPDX-License-Identifier: BSD-3-Clause
"""A decoding step on a GPU: captured, compiled, without host waits, in fixed memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_dmattn import AttentionCache, DynamicMaskAttention
from flash_dmattn.modules import fusing
from flash_dmattn.state import stepping

WIDTH = 128


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


SETTINGS: dict[str, Any] = {"num_kv_heads": 2, "window_size": 24, "init_std": 0.2}


def make_layer(gpu: str, seed: int, **settings: int) -> DynamicMaskAttention:
    torch.manual_seed(seed)
    made = {**SETTINGS, "keep_last": 0, **settings}
    layer = DynamicMaskAttention(WIDTH, 4, **made, device=gpu, dtype=torch.bfloat16)
    layer.A.normal_()
    return layer


def outputs_in_float64(layer: DynamicMaskAttention, tokens: Tensor) -> Tensor:
    """Return the formula's output with `make_layer`'s parameters, for tokens ``(B, N, WIDTH)``."""
    exact = DynamicMaskAttention(
        WIDTH, 4, **SETTINGS, keep_last=0, backend="reference", dtype=torch.float64
    )
    exact.load_state_dict(layer.state_dict())
    outputs: Tensor = exact(tokens.double().cpu())
    return outputs


def tokens(gpu: str, count: int, batch: int = 1) -> Tensor:
    return torch.randn(count, batch, 1, WIDTH, device=gpu, dtype=torch.bfloat16)


def prompted(layer: DynamicMaskAttention, prompt: Tensor) -> AttentionCache:
    cache = AttentionCache()
    layer(prompt, cache=cache)
    layer(prompt[:, :1], cache=cache)  # compiles the kernels
    return cache


@pytest.mark.parametrize("batch", [1, 3, 6])
def test_replays_go_on(batch: int, gpu: str, seed: int) -> None:
    """Each replay advances the counters; later eager steps see its tokens."""
    layer = make_layer(gpu, seed)
    prompt = torch.randn(batch, 50, WIDTH, device=gpu, dtype=torch.bfloat16)
    eager, captured = prompted(layer, prompt), prompted(layer, prompt)
    given, token = tokens(gpu, 60, batch), tokens(gpu, 1, batch)[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(token, cache=captured)
    for new in given:
        want = layer(new, cache=eager)
        token.copy_(new)
        graph.replay()
        assert torch.equal(out, want)
    assert captured.length == eager.length == 111
    rest = torch.randn(batch, 30, WIDTH, device=gpu, dtype=torch.bfloat16)
    assert torch.equal(layer(rest, cache=captured), layer(rest, cache=eager))


def test_a_step_waits_for_nothing(gpu: str, seed: int) -> None:
    layer = make_layer(gpu, seed)
    cache = prompted(layer, torch.randn(1, 50, WIDTH, device=gpu, dtype=torch.bfloat16))
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for new, count in itertools.product(tokens(gpu, 20), (1, 3)):
            layer(new.expand(-1, count, -1).contiguous(), cache=cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_allocated() <= allocated + (1 << 20)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_steps_compile(mode: str, gpu: str, seed: int) -> None:
    """The error of compiled operations is at most twice that of the same eager operations."""
    layer = make_layer(gpu, seed)
    prompt = torch.randn(1, 50, WIDTH, device=gpu, dtype=torch.bfloat16)
    eager, cache = prompted(layer, prompt), prompted(layer, prompt)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    with (
        pytest.MonkeyPatch.context() as patch,
        torch._inductor.config.patch(emulate_precision_casts=True),
    ):
        for module in (fusing, stepping):
            patch.setattr(module, "has_kernel", lambda _: False)
        given = tokens(gpu, 12)
        results = [(compiled(new, cache=cache).clone(), layer(new, cache=eager)) for new in given]
    assert cache.length == eager.length
    seen = torch.cat([prompt, prompt[:, :1], *given], 1)
    exact = outputs_in_float64(layer, seen)[:, -len(given) :]
    of_compiled, of_eager = (
        (torch.cat(outputs, 1).double().cpu() - exact).square().mean().sqrt()
        for outputs in zip(*results, strict=True)
    )
    assert of_compiled <= 2 * of_eager, (of_compiled, of_eager)
