# SPDX-License-Identifier: BSD-3-Clause
"""Times attention over a sequence that is divided among the GPUs of this machine.

    python scripts/time_context_parallel.py --length 524288

A rank on each GPU computes its shard, forward and backward, with NCCL. Then one GPU computes the
whole sequence, and torch's own context parallelism (a ring) computes dense attention. It prints the
times, the rows that each rank sends and receives with their bounds, and whether repeated runs are
bitwise equal. The exit status is 1 if rows exceed a bound or runs differ.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flash_dmattn import flash_dmattn_func
from flash_dmattn.distributed import context_parallel, context_parallel_dmattn
from flash_dmattn.distributed.exchange import Exchange, exchange_rows
from flash_dmattn.state.rows import Rows


def main() -> None:
    """Start a rank on each GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--length", type=int, default=1 << 19, help="tokens of the sequence")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=20, help="whose results must be equal")
    parser.add_argument("--ring-seconds", type=float, default=45, help="0 leaves the ring out")
    options = parser.parse_args()
    if options.ranks < 2 or options.length % options.ranks:
        sys.exit("there must be two GPUs at least, and their number must divide the length")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options, str(Path(folder, "meeting")))
        torch.multiprocessing.spawn(run, arguments, nprocs=options.ranks)


def run(rank: int, options: argparse.Namespace, meeting: str) -> None:
    """Run the measurements of one rank."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=options.ranks,
        device_id=device,
    )
    try:
        is_right = measure(options, rank, device)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    dist.destroy_process_group()
    if not is_right:
        sys.exit(1)


def measure(options: argparse.Namespace, rank: int, device: torch.device) -> bool:
    """Print the measurements on rank 0; return whether the checks of rows and bits pass."""
    say(rank, f"{options.ranks} x {torch.cuda.get_device_name()}, {vars(options)}")
    shard = make_tensors(options, options.length // options.ranks, device, seed=rank)
    is_right = check(shard, options, rank)
    for deterministic in (True, False):
        together = milliseconds(lambda d=deterministic: sharded(shard, options, d), device)
        kind = "in equal bits" if deterministic else "by default"
        say(rank, f"{options.ranks} ranks, forward + backward, {kind}: {together:.2f} ms")
    alone = milliseconds(lambda: local(shard, options), device)
    say(rank, f"the shard alone, without the others' keys: {alone:.2f} ms on the slowest rank")
    shard.clear()
    torch.cuda.empty_cache()
    time_whole(options, rank, device, together)
    if options.ring_seconds:
        time_ring(options, rank, device)
    return is_right


def check(shard: list[Tensor], options: argparse.Namespace, rank: int) -> bool:
    """Check that exchanged rows are within their bounds, and that runs are bitwise equal."""
    exchanges: list[Exchange] = []

    def noted(candidates: Rows, exchange: Exchange) -> tuple[Tensor, Tensor, Tensor]:
        exchanges.append(exchange)
        return exchange_rows(candidates, exchange)

    context_parallel.exchange_rows = noted
    first = sharded(shard, options, deterministic=True)
    context_parallel.exchange_rows = exchange_rows
    rows_are_few = check_rows(exchanges[0], options, rank)
    equal = all(
        torch.equal(one, other)
        for _ in range(options.runs)
        for one, other in zip(first, sharded(shard, options, deterministic=True), strict=True)
    )
    flags = torch.tensor([equal, rows_are_few], device="cuda", dtype=torch.int32)
    dist.all_reduce(flags, dist.ReduceOp.MIN)
    say(rank, f"{options.runs} runs bitwise equal on all ranks: {bool(flags[0])}")
    return bool(flags.all())


def make_tensors(
    options: argparse.Namespace, length: int, device: torch.device, seed: int
) -> list[Tensor]:
    """Return query, key, value and bias, which require gradients, and dout."""
    generator = torch.Generator(device).manual_seed(seed)
    heads = (options.heads, options.kv_heads, options.kv_heads, options.heads)
    query, key, value, dout = (
        torch.randn(
            1, length, count, options.dim, device=device, dtype=torch.bfloat16, generator=generator
        )
        for count in heads
    )
    bias = torch.randn(1, options.kv_heads, 1, length, device=device, generator=generator)
    return [*(t.requires_grad_() for t in (query, key, value, bias)), dout]


def sharded(shard: list[Tensor], options: argparse.Namespace, deterministic: bool) -> list[Tensor]:
    """Return this rank's results and gradients."""
    *leaves, dout = shard
    query, key, value, bias = leaves
    out = context_parallel_dmattn(
        query, key, value, bias, options.window, deterministic=deterministic
    )
    assert isinstance(out, Tensor)
    return [out, *torch.autograd.grad(out, leaves, dout)]


def local(tensors: list[Tensor], options: argparse.Namespace) -> None:
    """Compute attention on one GPU without any exchange."""
    *leaves, dout = tensors
    query, key, value, bias = leaves
    out = flash_dmattn_func(
        query, key, value, attn_bias=bias, is_causal=True, window_size=options.window
    )
    assert isinstance(out, Tensor)
    torch.autograd.grad(out, leaves, dout)


def check_rows(exchange: Exchange, options: argparse.Namespace, rank: int) -> bool:
    """Print the exchanged rows; return whether they are within their bounds."""
    bound = options.window * options.kv_heads
    counts = torch.tensor([exchange.received, sum(exchange.sent_counts)], device="cuda")
    of_ranks = [torch.empty_like(counts) for _ in range(options.ranks)]
    dist.all_gather(of_ranks, counts)
    for number, pair in enumerate(of_ranks):
        received, sent = pair.tolist()
        say(
            rank,
            f"  rank {number}: forward receives {received} rows (at most {bound}), backward sends "
            f"as many and receives {sent} (at most {bound * (options.ranks - 1)})",
        )
    bytes_of_row = 2 * 2 * options.dim
    say(rank, f"  {bound * bytes_of_row / 1e6:.1f} MB at most, in pairs of rows of key and value")
    return all(
        int(pair[0]) <= bound and int(pair[1]) <= bound * (options.ranks - 1) for pair in of_ranks
    )


def time_whole(
    options: argparse.Namespace, rank: int, device: torch.device, together: float
) -> None:
    """Time one GPU with the sequence, which is halved until it fits in memory."""
    length, taken = options.length, None
    while rank == 0 and taken is None:
        try:
            taken = time_alone(options, length, device)
        except torch.OutOfMemoryError:
            length //= 2
        torch.cuda.empty_cache()
    dist.barrier()
    if taken is not None:
        scaled = taken * options.length / length
        print(f"one GPU, {length} tokens: {taken:.2f} ms")
        print(f"{options.ranks} ranks are {scaled / together:.2f} x as fast, by tokens", flush=True)


def time_alone(options: argparse.Namespace, length: int, device: torch.device) -> float:
    """Return the time of one GPU."""
    whole = make_tensors(options, length, device, seed=0)
    return milliseconds(lambda: local(whole, options), device, alone=True)


def time_ring(options: argparse.Namespace, rank: int, device: torch.device) -> None:
    """Time torch's ring with dense attention, doubling the length until the time runs out."""
    from torch.distributed.tensor.experimental import context_parallel as ring
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = dist.init_device_mesh("cuda", (options.ranks,))
    length, begin = min(1 << 17, options.length), time.monotonic()
    while length <= options.length:
        shape = (1, options.heads, length, options.dim)
        generator = torch.Generator(device).manual_seed(0)
        buffers = [
            torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)
            for _ in range(4)
        ]
        try:
            with (
                ring(mesh, buffers=buffers, buffer_seq_dims=[2] * 4),
                sdpa_kernel(SDPBackend.FLASH_ATTENTION),
            ):
                *leaves, dout = buffers
                for tensor in leaves:
                    tensor.requires_grad_()

                def call(leaves: list[Tensor] = leaves, dout: Tensor = dout) -> None:
                    out = scaled_dot_product_attention(*leaves, is_causal=True)
                    torch.autograd.grad(out, leaves, dout)

                taken = milliseconds(call, device, repeats=2)
                for tensor in leaves:
                    tensor.requires_grad_(False)
        except Exception as error:
            say(rank, f"torch's ring, {length} tokens: {type(error).__name__}: {error}")
            return
        say(rank, f"torch's ring, dense, {length} tokens: {taken:.2f} ms")
        # The next round has three calls, each with four times the pairs.
        left = options.ring_seconds - (time.monotonic() - begin)
        is_left = torch.tensor(float(left > 12 * taken / 1e3), device=device)
        dist.broadcast(is_left, 0)
        if not is_left:
            return
        length *= 2


def milliseconds(
    call: Callable[[], object], device: torch.device, *, repeats: int = 8, alone: bool = False
) -> float:
    """Return the median time of a call on the slowest rank."""
    call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if not alone:
            dist.barrier()
        torch.cuda.synchronize(device)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize(device)
        taken = torch.tensor(begin.elapsed_time(end), device=device)
        if not alone:
            dist.all_reduce(taken, dist.ReduceOp.MAX)
        times.append(taken.item())
    return statistics.median(times)


def say(rank: int, text: str) -> None:
    """Print a line on rank 0 only."""
    if rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
