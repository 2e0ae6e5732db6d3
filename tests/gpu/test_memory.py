# SPDX-License-Identifier: BSD-3-Clause
"""The memory of a training step: linear in the length, and a few times that of the queries."""

from __future__ import annotations

import pytest
import torch

from flash_dmattn import flash_dmattn_func, loader

WINDOW = 1024


def bytes_over_query(length: int, heads: int, kv_heads: int, head_dim: int, device: str) -> float:
    """Return the allocations of forward and backward, relative to the bytes of the query."""
    query, dout = (
        torch.randn(1, length, heads, head_dim, device=device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    key, value = (
        torch.randn(1, length, kv_heads, head_dim, device=device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    bias = torch.randn(1, kv_heads, length, device=device, dtype=torch.bfloat16)
    inputs = [tensor.requires_grad_() for tensor in (query, key, value, bias)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = flash_dmattn_func(query, key, value, attn_bias=bias, is_causal=True, window_size=WINDOW)
    torch.autograd.grad(out, inputs, dout)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / (query.numel() * query.element_size())


@pytest.mark.parametrize("sizes", [(4, 1, 64), (8, 2, 128)], ids=str)
def test_memory_is_linear(sizes: tuple[int, int, int], gpu: str) -> None:
    bytes_over_query(4096, *sizes, gpu)  # one-time allocations
    short, long = (bytes_over_query(1 << power, *sizes, gpu) for power in (17, 19))
    assert long <= 6
    assert long <= 1.1 * short


def test_a_shared_bias_takes_no_more_than_its_gradient(gpu: str) -> None:
    """Apart from the bias gradient, the allocations are linear in the length."""
    shapes = [(2, 2048, 16, 64)] * 4 + [(1, 16, 2048, 2048)]
    tensors = [torch.randn(*shape, device=gpu, dtype=torch.bfloat16) for shape in shapes]
    dout, *inputs = tensors[0], *(tensor.requires_grad_() for tensor in tensors[1:])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(flash_dmattn_func(*inputs[:3], attn_bias=inputs[3]), inputs, dout)
    torch.cuda.synchronize()
    most = (inputs[3].numel() + 16 * dout.numel()) * dout.element_size()
    assert torch.cuda.max_memory_allocated() - before <= most


@pytest.mark.parametrize("length", [128, 250, 256, 333, 384])
def test_sums_of_a_shared_bias_take_no_memory_of_their_own(length: int, gpu: str) -> None:
    """Apart from results, only float32 numbers of rows and bias are allocated: about 3 x lse."""
    shapes = [(length, length, 4, 32)] * 4 + [(1, 4, length, length)]
    tensors = [torch.randn(*shape, device=gpu, dtype=torch.bfloat16) for shape in shapes]
    dout, *inputs = tensors[0], *(tensor.requires_grad_() for tensor in tensors[1:])
    mask = torch.rand(length, 1, 1, length, device=gpu) > 0.1

    def requested() -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        out = flash_dmattn_func(*inputs[:3], mask, inputs[3])
        torch.autograd.grad(out, inputs, dout)
        torch.cuda.synchronize()
        peak: int = torch.cuda.memory_stats()["requested_bytes.all.peak"]
        return peak - before

    requested()  # one-time allocations
    rows = 4 * length**2 * 4
    tiles = 4 * (-(-length // 128) * 128) ** 2 * 4  # of the bias gradient's sums
    parts = 0
    if "wgmma" not in loader.pack_for("cuda").features:
        # Each thread block has two partial tiles of 128 x 128; an SM holds two blocks.
        parts = 4 * torch.cuda.get_device_properties(gpu).multi_processor_count * 128**2 * 4
    most = 4 * dout.numel() * dout.element_size() + 2 * rows + max(rows, tiles) + parts
    assert requested() <= most
