# SPDX-License-Identifier: BSD-3-Clause
"""One query over few keys, without gradients. GPUs have a kernel for it that makes no list and
reads 32 keys at a time, including dropped ones.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from drawn.calls import Call
from drawn.judge import expected
from drawn.problems import bounds
from support import Target, rand_bool, randn

# Near multiples of the keys that a warp, a block of four or eight warps, or a cluster reads.
KEYS = (1, 31, 33, 127, 129, 257, 2049, 4095)


def step(
    target: Target, keys: int, *, group: int = 2, batch: int = 2, head_dim: int = 64, **fields: Any
) -> Call:
    """Return a call of one query and two KV heads in the target's last dtype."""
    rows, columns = (batch, 1, 2 * group, head_dim), (batch, keys, 2, head_dim)
    shapes = (rows, columns, columns, rows)
    tensors = [randn(*shape, seed=n).to(target.dtypes[-1]) for n, shape in enumerate(shapes)]
    call = Call(*tensors, randn(batch, 2 * group, 1, seed=9), wanted=())
    return dataclasses.replace(call, **fields).to(target.device)


def check(call: Call, target: Target) -> dict[str, Tensor]:
    got = call.results(backend=target.backend)
    expected(call).check(got)
    return got


@pytest.mark.parametrize("keys", KEYS)
def test_all_keys(keys: int, kernel_target: Target) -> None:
    check(step(kernel_target, keys, batch=3), kernel_target)


@pytest.mark.parametrize("group", [1, 3, 8, 11, 24])
@pytest.mark.parametrize("bias_heads", [1, 2, 0])
def test_groups_of_heads(bias_heads: int, group: int, kernel_target: Target) -> None:
    """At most eight heads share a thread block, and none do if each has its own bias."""
    bias = randn(2, bias_heads or 2 * group, 1, 300, seed=4)
    mask = rand_bool(2, 1, 1, 300, density=0.6, seed=5)
    check(step(kernel_target, 300, group=group, bias=bias, mask=mask), kernel_target)


@pytest.mark.parametrize("head_dim", [8, 24, 72, 120, 128])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"scale": 0.03, "causal": True}])
def test_head_dims(options: dict[str, Any], head_dim: int, kernel_target: Target) -> None:
    sink = torch.tensor([0.5, -1.0, 3.0, -torch.inf])
    bias = randn(1, 2, 1, 500, dtype=kernel_target.dtypes[-1], seed=4)
    call = step(kernel_target, 500, head_dim=head_dim, sink=sink, bias=bias, **options)
    check(call, kernel_target)


@pytest.mark.parametrize("batch", [1, 150])
def test_as_many_blocks_as_there_are(batch: int, kernel_target: Target) -> None:
    """One sequence uses clusters; with many, thread blocks share an SM."""
    mask = rand_bool(batch, 2, 1, 600, density=0.3, seed=6)
    mask[0] = False
    got = check(step(kernel_target, 600, batch=batch, mask=mask), kernel_target)
    assert not got["out"][0].any()
    assert got["lse"][0].isneginf().all()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("keys", [20_001, 40_000])
def test_several_clusters(keys: int, masked: bool, kernel_target: Target) -> None:
    """Enough keys make several clusters share one sequence."""
    mask = rand_bool(1, 2, 1, keys, density=0.01, seed=6) if masked else None
    bias = randn(1, 2, 1, keys, seed=4)
    sink = torch.tensor([0.5, -1.0, 3.0, -torch.inf])
    check(step(kernel_target, keys, batch=1, mask=mask, bias=bias, sink=sink), kernel_target)


def test_rows_of_larger_tensors(kernel_target: Target) -> None:
    call = step(kernel_target, 700, group=4)
    cache = torch.full((2, 2, 900, 3, 64), torch.nan).to(call.query)
    cache[:, :, 100:800, 1:] = torch.stack([call.key, call.value], 1)
    key, value = cache[:, 0, 100:800, 1:], cache[:, 1, 100:800, 1:]
    check(dataclasses.replace(call, key=key, value=value), kernel_target)


@pytest.mark.parametrize("masked", [False, True])
def test_packed_sequences(masked: bool, kernel_target: Target) -> None:
    """Some have no query, and some no key."""
    queries, keys = [1, 0, 1, 1, 1], [40, 7, 0, 333, 1]
    call = step(kernel_target, sum(keys), batch=1, group=4)
    sizes = (bounds(queries).to(call.query.device), bounds(keys).to(call.query.device))
    query = randn(sum(queries), 8, 64, seed=7).to(call.query)
    mask = rand_bool(2, 1, sum(keys), density=0.5, seed=8).to(call.query.device)
    packed = dataclasses.replace(
        call,
        query=query,
        key=call.key[0],
        value=call.value[0],
        dout=torch.zeros_like(query),
        dlse=torch.zeros(8, sum(queries)).to(query.device),
        mask=mask if masked else None,
        cu_seqlens_q=sizes[0],
        cu_seqlens_k=sizes[1],
        longest=(1, max(keys)),
    )
    check(packed, kernel_target)


def test_packed_sequences_with_a_bias_for_each_query(kernel_target: Target) -> None:
    """The bias of the last query follows those of the others."""
    queries, keys = [1, 1, 0, 1], [50, 20, 400, 33]
    call = step(kernel_target, sum(keys), batch=1, group=2)
    query = randn(sum(queries), 4, 64, seed=7).to(call.query)
    bias = randn(4, sum(queries), max(keys), dtype=query.dtype, seed=8).to(query.device)
    packed = dataclasses.replace(
        call,
        query=query,
        key=call.key[0],
        value=call.value[0],
        bias=bias,
        dout=torch.zeros_like(query),
        dlse=torch.zeros(4, sum(queries)).to(query.device),
        cu_seqlens_q=bounds(queries).to(query.device),
        cu_seqlens_k=bounds(keys).to(query.device),
        longest=(1, max(keys)),
    )
    check(packed, kernel_target)


def test_odd_biases(kernel_target: Target) -> None:
    """A bias of -inf drops its key, and NaN is a score."""
    bias = randn(2, 1, 1, 400, seed=12)
    bias[0, :, :, 5:9] = -torch.inf
    mask = rand_bool(2, 1, 1, 400, density=0.5, seed=13)
    call = step(kernel_target, 400, bias=bias, mask=mask)
    check(call, kernel_target)
    call.mask[0, ..., 7] = True
    call.bias[0, ..., 7] = torch.nan
    out = call.results(backend=kernel_target.backend)["out"]
    assert out[0].isnan().all()
    assert not out[1].isnan().any()


@pytest.mark.parametrize("keys", [200, 3000])
def test_dropped_keys_reach_nothing(keys: int, kernel_target: Target) -> None:
    mask = rand_bool(2, 2, 1, keys, density=0.5, seed=10)
    call = step(kernel_target, keys, group=3, mask=mask, bias=randn(2, 2, 1, keys, seed=11))
    clean = check(call, kernel_target)
    dropped = ~call.mask[:, :, 0].transpose(1, 2)
    poisoned = {
        "key": call.key.masked_fill(dropped[..., None], torch.nan),
        "value": call.value.masked_fill(dropped[..., None], torch.inf),
        "bias": call.bias.masked_fill(~call.mask, torch.nan),
    }
    got = dataclasses.replace(call, **poisoned).results(backend=kernel_target.backend)
    for name, value in clean.items():
        assert torch.equal(got[name], value), name
