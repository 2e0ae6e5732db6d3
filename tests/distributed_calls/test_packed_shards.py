# SPDX-License-Identifier: BSD-3-Clause
"""Packed sequences whose lengths differ on each rank."""

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

# Tokens by rank, then by sequence. Fewer ranks use the last entries.
LENGTHS = ((9, 0, 3, 0), (0, 30, 0, 1), (0, 0, 0, 0), (2, 11, 40, 5))


class Case(NamedTuple):
    heads: int = 2
    kv_heads: int = 1
    bias_heads: int = 1
    window: int = 6
    levels: int = 4
    options: dict[str, Any] = {}  # noqa: RUF012
    dtype: torch.dtype = torch.float64


CASES = [
    Case(),
    Case(heads=4, kv_heads=2, bias_heads=2, window=64),
    Case(heads=4, kv_heads=2, bias_heads=4, options={"softcap": 2.0}),
    Case(heads=4, kv_heads=2, window=1, levels=1),
    Case(options={"sink": torch.tensor([0.7, -0.4]), "softmax_scale": 0.3}),
    Case(heads=4, kv_heads=2, bias_heads=2, dtype=torch.bfloat16),
    Case(heads=4, kv_heads=2, bias_heads=4, options={"keep_last": 5, "keep_first": 2}),
    Case(window=3, options={"keep_last": 12}),
    Case(window=0, options={"keep_last": 4, "keep_first": 9}),
]


def make_sequences(case: Case, lengths: list[int]) -> list[list[Tensor]]:
    """Return query, key, value, bias and dout of each whole sequence."""
    generator = torch.Generator().manual_seed(0)

    def normal(length: int, heads: int) -> Tensor:
        made = torch.randn(1, length, heads, 16, generator=generator, dtype=torch.float64)
        return made.to(case.dtype)

    sequences = []
    for length in lengths:
        shape = (1, case.bias_heads, 1, length)
        bias = (torch.randint(0, case.levels, shape, generator=generator) / 2).to(
            torch.promote_types(case.dtype, torch.float32)
        )
        bias[torch.rand(shape, generator=generator) < 0.1] = -torch.inf
        heads = (case.heads, case.kv_heads, case.kv_heads)
        tensors = [normal(length, count) for count in heads]
        sequences.append([*tensors, bias, normal(length, case.heads)])
    return sequences


def whole_results(case: Case, tensors: list[Tensor]) -> list[Tensor]:
    *leaves, dout = [t.double() for t in tensors]
    for leaf in leaves:
        leaf.requires_grad_()
    query, key, value, bias = leaves
    settings: dict[str, Any] = {**case.options, "window_size": case.window, "is_causal": True}
    out = flash_dmattn_func(query, key, value, attn_bias=bias, backend="reference", **settings)
    assert isinstance(out, Tensor)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def packed(sequences: list[list[Tensor]], bias_place: int, own: list[slice]) -> list[Tensor]:
    """Return this rank's parts of the sequences, packed."""
    result = []
    for place, of_sequences in enumerate(zip(*sequences, strict=True)):
        parts = zip(of_sequences, own, strict=True)
        if place == bias_place:
            result.append(torch.cat([tensor[0, ..., part] for tensor, part in parts], 2))
        else:
            result.append(torch.cat([tensor[0, part] for tensor, part in parts]))
    return result


def own_parts() -> tuple[list[slice], Tensor]:
    """Return this rank's part of each sequence, and the bounds of the parts."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    lengths = torch.tensor(LENGTHS[-ranks:])
    ends = lengths.cumsum(0)[rank]
    bounds = torch.cat([torch.zeros(1), lengths[rank].cumsum(0)]).int()
    starts = ends - lengths[rank]
    return [slice(int(a), int(b)) for a, b in zip(starts, ends, strict=True)], bounds


def check_case(case: Case, device: str) -> None:
    own, bounds = own_parts()
    totals = torch.tensor(LENGTHS[-dist.get_world_size() :]).sum(0).tolist()
    sequences = make_sequences(case, totals)
    want = packed([whole_results(case, tensors) for tensors in sequences], 4, own)
    *local, dout = (tensor.to(device) for tensor in packed(sequences, 3, own))
    for tensor in local:
        tensor.requires_grad_()
    query, key, value, bias = local
    out = context_parallel_dmattn(
        query,
        key,
        value,
        bias,
        case.window,
        cu_seqlens=bounds.to(device),
        backend="reference" if case.dtype == torch.float64 else None,
        **{n: o.to(device) if isinstance(o, Tensor) else o for n, o in case.options.items()},
    )
    assert isinstance(out, Tensor)
    got = [out.detach(), *torch.autograd.grad(out, local, dout)]
    tolerance = 1e-12 if case.dtype == torch.float64 else 3e-2
    for one, other in zip(got, want, strict=True):
        scale = max(1.0, float(other.abs().max())) if other.numel() else 1.0
        torch.testing.assert_close(one.cpu().double(), other, atol=tolerance * scale, rtol=0)


def check_layer(device: str) -> None:
    """Each sequence gets its result of a separate call, however it is divided."""
    own, bounds = own_parts()
    totals = torch.tensor(LENGTHS[-dist.get_world_size() :]).sum(0).tolist()
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    settings: dict[str, Any] = {"window_size": 7, "init_std": 0.2, "dtype": dtype}
    settings |= {"keep_last": 3, "keep_first": 1}
    whole = DynamicMaskAttention(32, 4, 2, **settings)
    layer = ContextParallelAttention(32, 4, 2, **settings)
    layer.load_state_dict(whole.state_dict())
    states = [torch.randn(1, total, 32, dtype=dtype) for total in totals]
    want = torch.cat([whole(x)[0, part] for x, part in zip(states, own, strict=True)])
    local = torch.cat([x[0, part] for x, part in zip(states, own, strict=True)])
    got = layer.to(device)(local.to(device), cu_seqlens=bounds.to(device))
    tolerance = 1e-5 if device == "cpu" else 3e-2
    torch.testing.assert_close(got.cpu(), want, atol=tolerance, rtol=tolerance)


def check_all(device: str) -> None:
    """Run all checks on a rank."""
    for number, case in enumerate(CASES):
        if device == "cpu" or case.dtype != torch.float64:
            try:
                check_case(case, device)
            except BaseException as error:
                raise AssertionError(f"case {number} on rank {dist.get_rank()}") from error
    check_layer(device)


@pytest.mark.parametrize("ranks", [2, 4])
def test_packed_shards(ranks: int, tmp_path: Path) -> None:
    run_on_ranks(check_all, ranks, tmp_path, "cpu")


@pytest.mark.parametrize("ranks", [2, 4])
def test_on_gpus(ranks: int, tmp_path: Path) -> None:
    run_on_ranks(check_all, gpus(ranks), tmp_path, "cuda")


def test_wrong_arguments_are_explained(tmp_path: Path) -> None:
    run_on_ranks(check_messages, 1, tmp_path, "cpu")


def check_messages(device: str) -> None:
    del device
    query, key, bias = torch.zeros(5, 4, 8), torch.zeros(5, 2, 8), torch.zeros(2, 1, 5)
    bounds = torch.tensor([0, 5], dtype=torch.int32)
    given: dict[str, Any] = {"window_size": 3, "cu_seqlens": bounds}
    for wrong, message in (
        ({"padding": torch.ones(1, 5).bool()}, "padding must be None with cu_seqlens"),
        ({"cu_seqlens": bounds.long()}, "cu_seqlens must have dtype torch.int32"),
        ({"cu_seqlens": bounds[:1]}, "the bounds of one sequence at least"),
        ({"query": query[None]}, r"query must have shape \(total, heads, D\)"),
        ({"value": key[:4]}, "value must have shape"),
        ({"attn_bias": torch.zeros(2, 5, 5)}, "attn_bias must have shape"),
    ):
        arguments = {"query": query, "key": key, "value": key, "attn_bias": bias, **given}
        with pytest.raises((TypeError, ValueError), match=message):
            context_parallel_dmattn(**{**arguments, **wrong})


def check_shared_and_wrong(device: str) -> None:
    """Check a bias that is expanded over heads, and bounds that do not fit; runs on a rank."""
    torch.manual_seed(dist.get_rank())
    query, key, value = (torch.randn(9, heads, 8, device=device) for heads in (4, 2, 2))
    bias = torch.randn(1, 1, 9, device=device).expand(2, -1, -1)
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    tensors = query, key, value
    got, want = (
        context_parallel_dmattn(*tensors, each, 3, cu_seqlens=bounds)
        for each in (bias, bias.contiguous())
    )
    torch.testing.assert_close(got, want, atol=0, rtol=0)
    for end in (7, 12):
        bounds[2] = end
        with pytest.raises(ValueError, match=f"cu_seqlens must end with 9, .*, got {end}"):
            context_parallel_dmattn(*tensors, bias, 3, cu_seqlens=bounds)


def test_a_bias_may_be_expanded_and_bounds_must_fit(tmp_path: Path) -> None:
    run_on_ranks(check_shared_and_wrong, 2, tmp_path, "cpu")
