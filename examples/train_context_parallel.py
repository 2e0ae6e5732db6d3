# SPDX-License-Identifier: BSD-3-Clause
"""Train on sequences that are divided among ranks, which exchange only the kept keys.

    torchrun --nproc-per-node 4 examples/train_context_parallel.py

Shows that loss and gradients equal those of the whole sequence on one rank, and how little of it
is exchanged. Runs on GPUs, one for each rank, over NCCL; otherwise on CPUs, over gloo. Without
torchrun it is a group of one.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flash_dmattn.distributed import ContextParallelAttention
from small_lm import LanguageModel, entropy, kept_keys, load_text, make_parser


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=30, help="training steps")
    parser.add_argument("--context", type=int, default=2048, help="bytes of a sequence, all ranks")
    options = parser.parse_args()

    device = join()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(options.seed)
    model = make_model(options).to(device)
    text, held_out = load_text()
    generator = torch.Generator().manual_seed(options.seed)  # the same text on all ranks
    check_against_one_rank(model, text[: options.context + 1].to(device))

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = None
    for step in range(options.steps):
        start = int(torch.randint(len(text) - options.context - 1, (), generator=generator))
        piece = text[start : start + options.context + 1].to(device)
        loss = loss_of_shard(model, piece, rank, ranks)
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        dist.all_reduce(loss.detach_())
        first = loss.item() if first is None else first
        if rank == 0 and step % max(1, options.steps // 5) == 0:
            print(f"step {step:4}  loss {loss.item():.3f}")
    if rank == 0:
        print(f"Loss {first:.3f} before; byte frequencies alone give {entropy(held_out):.3f}")
        others = options.context - options.context // ranks
        print(f"A rank gets at most {min(options.window, others)} keys a head of {others}")
    assert first is not None
    assert loss.item() < first
    dist.destroy_process_group()


def join() -> torch.device:
    """Join the group of ranks, and return this rank's device."""
    for name, alone in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, alone)
    os.environ.setdefault("MASTER_PORT", "29507")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.device_count() <= local:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    return torch.device("cuda", local)


def make_model(options: argparse.Namespace) -> LanguageModel:
    """Return a model whose layers see the shards of earlier ranks."""
    attentions: list[nn.Module] = [
        ContextParallelAttention(options.width, 4, 2, **kept_keys(options.window))
        for _ in range(options.layers)
    ]
    return LanguageModel(attentions, options.width)


def loss_of_shard(model: LanguageModel, piece: Tensor, rank: int, ranks: int) -> Tensor:
    """Return this rank's part of the mean loss of a sequence."""
    count = len(piece) - 1
    own = slice(rank * count // ranks, (rank + 1) * count // ranks)
    tokens, targets = piece[:-1][None, own], piece[1:][None, own]
    with torch.autocast(piece.device.type, torch.bfloat16, enabled=piece.is_cuda):
        logits = model(tokens).float()
    total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / count


def check_against_one_rank(model: LanguageModel, piece: Tensor) -> None:
    """Assert that loss and gradients equal those of a group of one, with the whole sequence."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    alone = [dist.new_group([member]) for member in range(ranks)][rank]
    loss = loss_of_shard(model, piece, rank, ranks)
    sharded = torch.autograd.grad(loss, list(model.parameters()))
    dist.all_reduce(loss.detach_())
    layers = [m for m in model.modules() if isinstance(m, ContextParallelAttention)]
    for layer in layers:
        layer.process_group = alone
    whole = loss_of_shard(model, piece, 0, 1)
    gradients = torch.autograd.grad(whole, list(model.parameters()))
    for layer in layers:
        layer.process_group = None
    squares = torch.zeros(2, device=piece.device)
    for mine, other in zip(sharded, gradients, strict=True):
        dist.all_reduce(mine)
        squares += torch.stack([(mine - other).square().sum(), other.square().sum()])
    difference = (squares[0] / squares[1]).sqrt().item()
    if rank == 0:
        print(f"{ranks} ranks, on {piece.device.type}: loss {loss.item():.6f}, of one rank")
        print(f"  {whole.item():.6f}; gradients differ by {difference:.1e} of their norm")
    assert abs(loss.item() - whole.item()) < (1e-2 if piece.is_cuda else 1e-5)
    assert difference < (5e-2 if piece.is_cuda else 1e-4)


if __name__ == "__main__":
    main()
