# SPDX-License-Identifier: BSD-3-Clause
"""The rows exchanged between ranks, the division of the input, and ranks that wait."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flash_dmattn import flash_dmattn_func
from flash_dmattn.distributed import context_parallel_dmattn, exchange

from .ranks import needs_gloo, run_on_ranks

pytestmark = needs_gloo

BATCH, KV_HEADS, WINDOW, TOKENS = 2, 2, 5, 40
PATIENCE = datetime.timedelta(seconds=4)


def make_shard(length: int) -> list[Tensor]:
    """Return query, key, value and bias with requires_grad."""
    torch.manual_seed(dist.get_rank())
    query = torch.randn(BATCH, length, 2 * KV_HEADS, 8)
    key, value = torch.randn(2, BATCH, length, KV_HEADS, 8)
    bias = torch.randn(BATCH, KV_HEADS, 1, length)
    return [tensor.requires_grad_() for tensor in (query, key, value, bias)]


def check_rows(device: str) -> None:
    """A rank receives at most B * window rows a KV head forward and sends them back backward."""
    del device
    counts: list[tuple[int, int, int]] = []
    exchange_rows: Any = exchange._all_to_all

    def counted(rows: Tensor, given: exchange.Exchange, *, is_backward: bool) -> Tensor:
        arrived: Tensor = exchange_rows(rows, given, is_backward=is_backward)
        counts.append((len(rows), len(arrived), rows.shape[1]))
        return arrived

    ranks = dist.get_world_size()
    bound = BATCH * KV_HEADS * WINDOW
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_all_to_all", counted)
        out = context_parallel_dmattn(*make_shard(TOKENS), WINDOW)
        assert isinstance(out, Tensor)
        out.sum().backward()
    (sent, received, width), *home = counts
    assert width == 2 * 8  # one row of key and of value
    assert received <= bound
    # Each rank but the first has enough keys before it.
    assert received == (bound if dist.get_rank() else 0)
    assert sent <= (ranks - 1) * bound
    assert [pair[:2] for pair in home] == [(received, sent)] * 2  # keys and values, then biases


def check_torch_divides(device: str) -> None:
    """torch's context-parallel sharding is contiguous without load balancing; runs on a rank."""
    from torch.distributed.tensor.experimental import _attention, context_parallel

    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    length = TOKENS * dist.get_world_size()
    query, key, value, bias = (
        normal(1, length, 4, 8),
        *(normal(1, length, KV_HEADS, 8) for _ in range(2)),
        normal(1, KV_HEADS, 1, length),
    )
    whole = flash_dmattn_func(query, key, value, attn_bias=bias, is_causal=True, window_size=WINDOW)
    assert isinstance(whole, Tensor)
    mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_attention._cp_options, "enable_load_balance", False)
        buffers = [query, key, value, bias, whole]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1, 3, 1]):
            out = context_parallel_dmattn(query, key, value, bias, WINDOW, mesh)
            torch.testing.assert_close(out, whole, atol=1e-5, rtol=1e-5)


def check_waiting_ends(device: str) -> None:
    """A rank waits for a failed rank until the group's timeout; runs on a rank."""
    del device
    group = dist.new_group(timeout=PATIENCE)
    query, key, value, bias = make_shard(TOKENS)
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="attn_bias must have shape"):
            context_parallel_dmattn(query, key, value, bias[..., 1:], WINDOW, group)
        time.sleep(3 * PATIENCE.total_seconds())
        return
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)time|abort|connect|closed"):
        context_parallel_dmattn(query, key, value, bias, WINDOW, group)
    assert time.monotonic() - begin < 2.5 * PATIENCE.total_seconds()


def check_all(device: str) -> None:
    """Run all checks on a rank."""
    check_rows(device)
    check_torch_divides(device)
    if dist.get_world_size() == 4:
        check_waiting_ends(device)


@pytest.mark.parametrize("ranks", [2, 4])
def test_groups(ranks: int, tmp_path: Path) -> None:
    run_on_ranks(check_all, ranks, tmp_path, "cpu")
