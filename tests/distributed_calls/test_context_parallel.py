# SPDX-License-Identifier: BSD-3-Clause
"""Attention over shards on several ranks equals one call over the whole sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flash_dmattn import DynamicMaskAttention, flash_dmattn_func
from flash_dmattn.distributed import ContextParallelAttention, context_parallel_dmattn

from .ranks import gpus, needs_gloo, run_on_ranks

pytestmark = needs_gloo


class Case(NamedTuple):
    """A call over a whole sequence, and its division into shards."""

    lengths: tuple[int, ...]  # of the shards; fewer ranks use the last ones
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    bias_heads: int = 1
    dim: int = 8
    window: int = 6
    levels: int = 4
    padded: bool = False
    bias_batch: int | None = None  # default: batch
    options: dict[str, Any] = {}  # noqa: RUF012
    dtype: torch.dtype = torch.float64


CASES = {
    "even": Case((16, 16, 16, 16)),
    "uneven": Case((3, 30, 0, 17), batch=2, heads=4, kv_heads=2, bias_heads=2),
    "empty first": Case((0, 9, 20, 1), bias_heads=2),
    "bias per query head": Case((20, 5, 21, 14), heads=4, kv_heads=2, bias_heads=4),
    "one bias for all heads": Case((20, 5, 21, 14), batch=2, heads=4, kv_heads=2),
    "one bias for all sequences": Case((20, 5, 0, 14), batch=3, heads=4, kv_heads=2, bias_heads=2,
                                       bias_batch=1),
    "padding": Case((20, 7, 21, 14), batch=3, heads=4, kv_heads=2, bias_heads=2, padded=True),
    "softcap and scale": Case((9, 20, 9, 9), options={"softcap": 2.0, "softmax_scale": 0.4}),
    "sink": Case((9, 20, 9, 9), options={"sink": torch.tensor([0.7, -0.4])}),
    "few survive": Case((40, 30, 5, 4), window=1, levels=1),
    "window of all": Case((9, 8, 7, 6), window=64, bias_heads=2),
    "last and first": Case((3, 30, 0, 17), batch=2, heads=4, kv_heads=2, bias_heads=2,
                           options={"keep_last": 9, "keep_first": 4}),
    "last and first of padded": Case((9, 2, 21, 3), batch=3, heads=4, kv_heads=2, padded=True,
                                     options={"keep_last": 7, "keep_first": 2}),
    "last, bias per query head": Case((20, 5, 21, 14), heads=4, kv_heads=2, bias_heads=4,
                                      options={"keep_last": 24}),
    "last and first alone": Case((9, 8, 7, 6), window=0,
                                 options={"keep_last": 10, "keep_first": 12}),
    "float32": Case((30, 20, 33, 9), batch=2, heads=4, kv_heads=2, bias_heads=2,
                    dtype=torch.float32, dim=32),
    "bfloat16": Case((30, 20, 33, 9), batch=2, heads=4, kv_heads=2, bias_heads=2, window=9,
                     dtype=torch.bfloat16, dim=64),
}  # fmt: skip


def make_tensors(case: Case, length: int) -> tuple[list[Tensor], Tensor | None]:
    """Return query, key, value, bias, dout and padding of the whole sequence."""
    generator = torch.Generator().manual_seed(length)

    def normal(heads: int) -> Tensor:
        shape = (case.batch, length, heads, case.dim)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)

    shape = (case.bias_batch or case.batch, case.bias_heads, 1, length)
    bias = torch.randint(0, case.levels, shape, generator=generator) / 2
    for value in (-torch.inf, torch.nan):
        bias[torch.rand(shape, generator=generator) < 0.08] = value
    heads = (case.heads, case.kv_heads, case.kv_heads)
    padding = torch.rand(case.batch, length, generator=generator) < 0.7 if case.padded else None
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    return [*map(normal, heads), bias.to(wide), normal(case.heads)], padding


def results(leaves: list[Tensor], out: Tensor, dout: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def check_case(case: Case, device: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    lengths = case.lengths[-ranks:]
    start, length = sum(lengths[:rank]), sum(lengths)
    (*tensors, dout), padding = make_tensors(case, length)
    exact = [t.double().requires_grad_() for t in tensors]
    settings: dict[str, Any] = {**case.options, "window_size": case.window}
    out = flash_dmattn_func(
        *exact[:3], padding, exact[3], is_causal=True, backend="reference", **settings
    )
    assert isinstance(out, Tensor)
    want = results(exact, out, dout.double())
    own = slice(start, start + lengths[rank])
    first = None
    for _ in range(3):
        local = [t[:, own].to(device).requires_grad_() for t in tensors[:3]]
        local.append(tensors[3][..., own].to(device).requires_grad_())
        seen = None if padding is None else padding[:, own].to(device)
        backend = "reference" if case.dtype == torch.float64 else None
        here = {
            name: option.to(device) if isinstance(option, Tensor) else option
            for name, option in settings.items()
        }
        out = context_parallel_dmattn(
            *local, padding=seen, backend=backend, deterministic=True, **here
        )
        assert isinstance(out, Tensor)
        got = results(local, out, dout[:, own].to(device))
        first = got if first is None else first
        assert all(torch.equal(a, b) for a, b in zip(got, first, strict=True))
    for index, (one, whole) in enumerate(zip(got, want, strict=True)):
        part = whole[..., own] if index == 4 else whole[:, own]
        scale = max(1.0, float(part.abs().max())) if part.numel() else 1.0
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(case.dtype, 3e-2) * scale
        torch.testing.assert_close(one.cpu().double(), part, atol=tolerance, rtol=0)


def check_all(device: str) -> None:
    """Check all cases; runs on a rank."""
    for name, case in CASES.items():
        if device != "cpu" and case.dtype == torch.float32:
            continue
        try:
            check_case(case, device)
        except BaseException as error:
            raise AssertionError(f"case {name!r} on rank {dist.get_rank()}") from error


def check_layer(device: str) -> None:
    """Check the layer; runs on a rank."""
    check_layer_of(device, {})
    check_layer_of(device, {"keep_last": 9, "keep_first": 3})


def check_layer_of(device: str, places: dict[str, int]) -> None:
    """The summed loss and parameter gradients equal those of the whole layer."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    settings: dict[str, Any] = {"window_size": 7, "dtype": dtype, "device": device, "init_std": 0.2}
    settings |= places
    whole = DynamicMaskAttention(32, 4, 2, **settings)
    mesh = dist.init_device_mesh(device.split(":")[0], (ranks,))
    layer = ContextParallelAttention(32, 4, 2, process_group=mesh, **settings)
    layer.load_state_dict(whole.state_dict())
    x = torch.randn(2, 20 * ranks, 32, device=device, dtype=dtype)
    padding = torch.rand(2, 20 * ranks, device=device) < 0.8
    bounds = [0, *(20 * r + 3 for r in range(1, ranks)), 20 * ranks]
    own = slice(bounds[rank], bounds[rank + 1])
    want = whole(x, padding=padding)
    got = layer(x[:, own], padding=padding[:, own])
    tolerance = 1e-5 if device == "cpu" else 3e-2
    torch.testing.assert_close(got, want[:, own], atol=tolerance, rtol=tolerance)
    if ranks == 2:  # the graph does not depend on the number of ranks
        compiled = torch.compile(layer, backend="aot_eager")(x[:, own], padding=padding[:, own])
        torch.testing.assert_close(compiled, want[:, own], atol=tolerance, rtol=tolerance)
    want.square().mean().backward()
    (got.square().sum() / want.numel()).backward()
    for one, other in zip(layer.parameters(), whole.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        dist.all_reduce(one.grad)
        torch.testing.assert_close(one.grad, other.grad, atol=tolerance, rtol=tolerance)
    with pytest.raises(ValueError, match="attn_mask must be None in context parallelism"):
        layer(x[:, own], padding[:, own])
    with pytest.raises(TypeError, match=r"hidden_states must be a torch.Tensor, got list"):
        layer([1])
    with pytest.raises(ValueError, match=r"hidden_states must have shape \(B, N, embed_dim\)"):
        layer(x[0, own])


def check_with_sharded_parameters(device: str) -> None:
    """Check FSDP2 and DDP, which average gradients over the ranks of a sequence; runs on a rank."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    settings: dict[str, Any] = {"window_size": 5, "init_std": 0.2, "device": device}
    if device != "cpu":
        settings["dtype"] = torch.bfloat16
    whole = DynamicMaskAttention(32, 4, 2, **settings)
    x = torch.randn(1, 16 * ranks, 32, device=device, dtype=settings.get("dtype"))
    whole(x).square().sum().backward()
    mesh = dist.init_device_mesh(device.split(":")[0], (ranks,))
    # torch 2.6's stand-in for a CPU stream records no event, so fully_shard fails there.
    shards = device != "cpu" or hasattr(torch.cpu.Stream, "record_event")
    for wrap in ("fsdp", "ddp") if shards else ("ddp",):
        layer = ContextParallelAttention(32, 4, 2, process_group=mesh, **settings)
        layer.load_state_dict(whole.state_dict())
        model: Any = fully_shard(layer, mesh=mesh) if wrap == "fsdp" else None
        if model is None:
            model = DistributedDataParallel(layer)
        model(x[:, 16 * rank : 16 * (rank + 1)]).square().sum().backward()
        for one, other in zip(layer.parameters(), whole.parameters(), strict=True):
            got: Any = one.grad
            got = got.full_tensor() if wrap == "fsdp" else got
            assert other.grad is not None
            tolerance = 1e-4 if device == "cpu" else 5e-2
            torch.testing.assert_close(
                got * ranks, other.grad, atol=tolerance * float(other.grad.abs().max()), rtol=0
            )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("check", [check_all, check_layer], ids=["function", "layer"])
def test_shards_give_what_the_whole_gives(check: Any, ranks: int, tmp_path: Path) -> None:
    run_on_ranks(check, ranks, tmp_path, "cpu")


def check_on_gpus(device: str) -> None:
    """Run all checks on a rank in one process, since starting one takes longest."""
    check_all(device)
    check_layer(device)
    check_with_sharded_parameters(device)


@pytest.mark.parametrize("ranks", [2, 4])
def test_on_gpus(ranks: int, tmp_path: Path) -> None:
    run_on_ranks(check_on_gpus, gpus(ranks), tmp_path, "cuda")


def test_parameters_are_sharded_too(tmp_path: Path) -> None:
    run_on_ranks(check_with_sharded_parameters, 2, tmp_path, "cpu")


def test_it_needs_a_group() -> None:
    tensors, _ = make_tensors(CASES["even"], 8)
    with pytest.raises(RuntimeError, match="start the program with torchrun"):
        context_parallel_dmattn(*tensors[:4], 3)
