# SPDX-License-Identifier: BSD-3-Clause
"""Forgetting over shards on several ranks equals one call over the whole sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import logsigmoid

from flash_dmattn import ForgettingAttention, flash_dmattn_func, forgetting_bias
from flash_dmattn.distributed import (
    ContextParallelForgetting,
    context_parallel_forgetting,
    forgetting,
)

from .ranks import gpus, needs_gloo, run_on_ranks

pytestmark = needs_gloo


class Case(NamedTuple):
    """A call over a whole sequence, and its division into shards."""

    lengths: tuple[int, ...]  # of the shards; fewer ranks use the last ones
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    gates: int = 2
    dim: int = 8
    prune: float = -4.0
    shift: float = 0.0  # of the gates' logits: sets the memory length
    padding: str = ""
    resets: bool = False
    options: dict[str, Any] = {}  # noqa: RUF012
    dtype: torch.dtype = torch.float64


CASES = {
    "even": Case((16, 16, 16, 16)),
    "uneven": Case((3, 30, 0, 17)),
    "empty first": Case((0, 9, 20, 1)),
    "empty last": Case((9, 20, 1, 0)),
    "gates of query heads": Case((20, 5, 21, 14), gates=4),
    "remembered over several shards": Case((9, 8, 7, 6), shift=4.0),
    "nothing forgotten": Case((9, 8, 7, 6), shift=9.0, prune=-60.0),
    "all forgotten": Case((9, 8, 7, 6), shift=-20.0, prune=-1.0),
    "padding": Case((20, 7, 21, 14), padding="some"),
    "padding on the left": Case((9, 7, 11, 14), padding="left", shift=2.0),
    "forgetting all before": Case((9, 8, 7, 6), resets=True, shift=4.0),
    "softcap and scale": Case((9, 20, 9, 9), options={"softcap": 2.0, "softmax_scale": 0.4}),
    "float32": Case((30, 20, 33, 9), dtype=torch.float32, dim=32, shift=2.0),
    "bfloat16": Case((30, 20, 33, 9), dtype=torch.bfloat16, dim=64, shift=2.0),
}


def make_tensors(case: Case) -> tuple[list[Tensor], Tensor | None]:
    """Return query, key, value, gates, dout and padding of the whole sequence."""
    length = sum(case.lengths)
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    *tensors, dout = (normal(case.batch, length, h, case.dim).to(case.dtype) for h in heads)
    gates = logsigmoid(normal(case.batch, case.gates, length) + case.shift)
    if case.resets:
        gates[..., length // 2] = -torch.inf
    if case.dtype != torch.float64:
        gates = gates.float()
    padding = None
    if case.padding:
        padding = torch.rand(case.batch, length, generator=generator) < 0.7
    if case.padding == "left":
        padding = torch.arange(length) >= torch.tensor([[length - 10], [2]])
    return [*tensors, gates, dout], padding


def results(leaves: list[Tensor], out: Tensor, dout: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def check_case(case: Case, device: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    case = case._replace(lengths=case.lengths[-ranks:])
    start = sum(case.lengths[:rank])
    (*tensors, dout), padding = make_tensors(case)
    exact = [t.double().requires_grad_() for t in tensors]
    bias, mask = forgetting_bias(exact[3], case.prune, padding=padding)
    whole = flash_dmattn_func(
        *exact[:3], mask, bias, is_causal=True, backend="reference", **case.options
    )
    assert isinstance(whole, Tensor)
    want = results(exact, whole, dout.double())
    own = slice(start, start + case.lengths[rank])
    local = [t[:, own].to(device).requires_grad_() for t in tensors[:3]]
    local.append(tensors[3][..., own].to(device).requires_grad_())
    seen = None if padding is None else padding[:, own].to(device)
    backend = "reference" if case.dtype == torch.float64 else None
    first = None
    for _ in range(2):
        out = context_parallel_forgetting(
            *local, case.prune, padding=seen, backend=backend, deterministic=True, **case.options
        )
        got = results(local, out, dout[:, own].to(device))
        first = got if first is None else first
        assert all(torch.equal(a, b) for a, b in zip(got, first, strict=True))
    for index, (one, all_of_it) in enumerate(zip(got, want, strict=True)):
        part = all_of_it[..., own] if index == 4 else all_of_it[:, own]
        scale = max(1.0, float(part.abs().max())) if part.numel() else 1.0
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(case.dtype, 3e-2) * scale
        torch.testing.assert_close(one.cpu().double(), part, atol=tolerance, rtol=0)


# Tokens by rank, then by sequence. Fewer ranks use the last entries.
LENGTHS = ((9, 0, 3, 0), (0, 30, 0, 1), (0, 0, 0, 0), (2, 11, 40, 5))


def check_packed(device: str) -> None:
    """Check that sequences are computed separately; runs on a rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    lengths = LENGTHS[-ranks:]
    for case in (Case(()), Case((), gates=4, shift=3.0, options={"softcap": 2.0})):
        sequences, wanted, own = [], [], []
        for parts in zip(*lengths, strict=True):
            (*tensors, dout), _ = make_tensors(case._replace(lengths=parts, batch=1))
            exact = [t.requires_grad_() for t in tensors]
            bias, mask = forgetting_bias(exact[3], case.prune)
            whole = flash_dmattn_func(
                *exact[:3], mask, bias, is_causal=True, backend="reference", **case.options
            )
            assert isinstance(whole, Tensor)
            wanted.append(results(exact, whole, dout))
            sequences.append([*tensors, dout])
            start = sum(parts[:rank])
            own.append(slice(start, start + parts[rank]))

        def packed(parts: list[list[Tensor]], gates: int, own: list[slice]) -> list[Tensor]:
            made = []
            for place, of_sequences in enumerate(zip(*parts, strict=True)):
                pairs = list(zip(of_sequences, own, strict=True))
                if place == gates:
                    made.append(torch.cat([t[0, ..., part] for t, part in pairs], 1))
                else:
                    made.append(torch.cat([t[0, part] for t, part in pairs]))
            return made

        *local, dout = (t.detach().to(device) for t in packed(sequences, 3, own))
        leaves = [t.requires_grad_() for t in local]
        counts = torch.tensor([o.stop - o.start for o in own])
        bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int().to(device)
        out = context_parallel_forgetting(
            *leaves, case.prune, cu_seqlens=bounds, backend="reference", **case.options
        )
        got = results(leaves, out, dout)
        for one, other in zip(got, packed(wanted, 4, own), strict=True):
            assert one.shape == other.shape
            torch.testing.assert_close(one.cpu(), other, atol=1e-12, rtol=1e-12)


def check_all(device: str) -> None:
    """Check all cases; runs on a rank."""
    for name, case in CASES.items():
        if device != "cpu" and case.dtype != torch.bfloat16:
            continue
        try:
            check_case(case, device)
        except BaseException as error:
            raise AssertionError(f"case {name!r} on rank {dist.get_rank()}") from error


def check_rows(device: str) -> None:
    """Ranks send only keys that are not decayed at a later rank's first row; runs on a rank."""
    del device
    planned: list[Any] = []
    plan = forgetting._plan_rows

    def watched(*arguments: Any) -> Any:
        planned.append(plan(*arguments))
        return planned[-1]

    rank, ranks = dist.get_rank(), dist.get_world_size()
    query, key, value = torch.randn(3, 1, 50, 2, 8)
    gates = torch.full((1, 2, 50), -1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forgetting, "_plan_rows", watched)
        context_parallel_forgetting(query, key, value, gates, -9.0)
        context_parallel_forgetting(query, key, value, gates, -60.0)
    near, far = planned
    assert near.received == [10 if source == rank - 1 else 0 for source in range(ranks)]
    assert near.sent == [10 if to == rank + 1 else 0 for to in range(ranks)]
    lives = {1: 50, 2: 11}
    assert far.received == [lives.get(rank - source, 0) for source in range(ranks)]


def check_layer(device: str) -> None:
    """The summed loss and parameter gradients equal those of the whole layer; runs on a rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "dtype": dtype, "device": device, "init_std": 0.2, "prune": -20.0,
        "half_lives": (0.5, 4.0), "rotary_base": 100.0,
    }  # fmt: skip
    whole = ForgettingAttention(32, 4, 2, **settings)
    mesh = dist.init_device_mesh(device.split(":")[0], (ranks,))
    layer = ContextParallelForgetting(32, 4, 2, process_group=mesh, **settings)
    layer.load_state_dict(whole.state_dict())
    x = torch.randn(2, 20 * ranks, 32, device=device, dtype=dtype)
    padding = torch.rand(2, 20 * ranks, device=device) < 0.8
    bounds = [0, *(20 * r + 3 for r in range(1, ranks)), 20 * ranks]
    own = slice(bounds[rank], bounds[rank + 1])
    want = whole(x, padding=padding)
    got = layer(x[:, own], padding=padding[:, own])
    tolerance = 1e-5 if device == "cpu" else 3e-2
    torch.testing.assert_close(got, want[:, own], atol=tolerance, rtol=tolerance)
    want.square().mean().backward()
    (got.square().sum() / want.numel()).backward()
    for (name, one), other in zip(layer.named_parameters(), whole.parameters(), strict=True):
        assert one.grad is not None, name
        assert other.grad is not None
        dist.all_reduce(one.grad)
        torch.testing.assert_close(one.grad, other.grad, atol=tolerance, rtol=tolerance, msg=name)
    if ranks == 2:
        compiled = torch.compile(layer, backend="aot_eager")(x[:, own], padding=padding[:, own])
        torch.testing.assert_close(compiled, want[:, own], atol=tolerance, rtol=tolerance)
    length = bounds[rank + 1] - bounds[rank]
    both = torch.tensor([0, length, 2 * length], dtype=torch.int32, device=device)
    parts = x[:, own].reshape(2 * length, 32)
    apart = whole(x).detach()[:, own].reshape(2 * length, 32)
    torch.testing.assert_close(layer(parts, cu_seqlens=both), apart, atol=tolerance, rtol=tolerance)
    for name in ("cache", "max_seqlen"):
        with pytest.raises(ValueError, match=f"{name} must be None in context parallelism"):
            layer(x[:, own], **{name: 3})
    with pytest.raises(TypeError, match=r"hidden_states must be a torch.Tensor, got list"):
        layer([1])
    layer.prune = None
    with pytest.raises(ValueError, match=r"prune must be a log decay, such as -16.0, in context"):
        layer(x[:, own])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "check",
    [check_all, check_layer, check_rows, check_packed],
    ids=["function", "layer", "rows", "packed"],
)
def test_shards_give_what_the_whole_gives(check: Any, ranks: int, tmp_path: Path) -> None:
    run_on_ranks(check, ranks, tmp_path, "cpu")


def check_on_gpus(device: str) -> None:
    """Run all checks on a rank in one process, since starting one takes longest."""
    check_all(device)
    check_layer(device)


@pytest.mark.parametrize("ranks", [2, 4])
def test_on_gpus(ranks: int, tmp_path: Path) -> None:
    run_on_ranks(check_on_gpus, gpus(ranks), tmp_path, "cuda")


def test_it_needs_a_group() -> None:
    (*tensors, _), _ = make_tensors(CASES["even"])
    with pytest.raises(RuntimeError, match="start the program with torchrun"):
        context_parallel_forgetting(*tensors, -4.0)
    with pytest.raises(ValueError, match="prune must be a finite log decay of at most 0"):
        context_parallel_forgetting(*tensors, 4.0)
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = [torch.zeros(9, heads, 8) for heads in (4, 2, 2)]
    gates = torch.zeros(2, 9)
    for wrong, text in (
        (
            (*packed[:2], packed[2][1:], gates),
            r"value must have shape \(total, heads, D\) with cu_seq",
        ),
        ((packed[0][None], *packed[1:], gates), "query must have shape"),
        ((*packed, gates[None]), r"log_forget must have shape \(H, total\) with cu_seqlens"),
        ((*packed, gates[:, 1:]), "cu_seqlens must rise from 0 to 8"),
    ):
        with pytest.raises(ValueError, match=text):
            context_parallel_forgetting(*wrong, -4.0, cu_seqlens=bounds)
    with pytest.raises(ValueError, match="padding must be None with cu_seqlens"):
        context_parallel_forgetting(
            *packed, gates, -4.0, cu_seqlens=bounds, padding=torch.ones(2, 9).bool()
        )
    with pytest.raises(TypeError, match=r"'process_group': it is called group here"):
        context_parallel_forgetting(*tensors, -4.0, process_group=None)  # type: ignore[arg-type]
