# SPDX-License-Identifier: BSD-3-Clause
"""The room of a plan for the columns of a tile, and tiles that exceed it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_dmattn import IntervalMask, dynamic_mask, flash_dmattn_func, flash_dmattn_varlen_func
from flash_dmattn.loader import pack_for
from support import Target, plan_bytes, randn

# More keys than a tile of a plan has room for if nothing is known of the mask.
MANY = 4500


def random_intervals(heads: int, queries: int, keys: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (1, heads, keys)
    start = torch.randint(-3, queries, shape, generator=generator, dtype=torch.int32)
    length = torch.randint(-20, queries, shape, generator=generator, dtype=torch.int32)
    return start, start + length


def results(mask: IntervalMask, target: Target, queries: int, keys: int, causal: bool):
    """Return out and all gradients; keys that no query keeps hold NaN."""
    dtype, heads, kv_heads, head_dim = target.dtypes[0], 4, 2, 16
    dropped = ~mask.to_bool(queries).any(2)[0]
    if causal:
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        dropped = ~(mask.to_bool(queries) & seen).any(2)[0]
    inputs = []
    for seed, shape in enumerate(
        [(1, queries, heads, head_dim), *[(1, keys, kv_heads, head_dim)] * 2, (1, kv_heads, keys)]
    ):
        tensor = randn(*shape, dtype=dtype, seed=seed)
        if seed in (1, 2):
            tensor[0][dropped.T] = torch.nan
        inputs.append(tensor.to(target.device).requires_grad_())
    query, key, value, bias = inputs
    out = flash_dmattn_func(
        query,
        key,
        value,
        mask.to(target.device),
        bias,
        is_causal=causal,
        deterministic=True,
        backend=target.backend,
    )
    dout = randn(*out.shape, dtype=dtype, seed=9).to(target.device)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(300, 330), (40, 500), (500, 40)])
def test_tiles_that_overflow(queries: int, keys: int, causal: bool, pack_target: Target) -> None:
    """A max_kept that is too small changes only the order of sums."""
    start, end = random_intervals(2, queries, keys)
    want = results(IntervalMask(start, end), pack_target, queries, keys, causal)
    got = results(IntervalMask(start, end, max_kept=1), pack_target, queries, keys, causal)
    for one, other in zip(got, want, strict=True):
        assert not one.isnan().any()
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("max_kept", [None, 1])
@pytest.mark.parametrize("keys", [600, 1500, 5000, 17000])
def test_kept_keys_among_others(keys: int, max_kept: int | None, pack_target: Target) -> None:
    """Other kernels make the plan of longer lists, with the same columns."""
    dtype, device = pack_target.dtypes[0], pack_target.device
    queries, kept = 300, 330
    places = torch.randperm(keys, generator=torch.Generator().manual_seed(4))[:kept].sort().values
    start, end = random_intervals(2, queries, kept)
    short = [randn(1, kept, 2, 16, dtype=dtype, seed=s) for s in (1, 2)]
    query = randn(1, queries, 4, 16, dtype=dtype).to(device)

    def out(key: Tensor, value: Tensor, start: Tensor, end: Tensor) -> Tensor:
        result: Tensor = flash_dmattn_func(
            query,
            key.to(device),
            value.to(device),
            IntervalMask(start, end, max_kept=max_kept).to(device),
            backend=pack_target.backend,
        )
        return result

    long = [
        tensor.new_full((1, keys, 2, 16), torch.nan).index_copy_(1, places, tensor)
        for tensor in short
    ]
    intervals = [
        torch.zeros(1, 2, keys, dtype=torch.int32).index_copy_(2, places, t) for t in (start, end)
    ]
    want, got = out(*short, start, end), out(*long, *intervals)
    assert not got.isnan().any()
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_a_mask_of_which_nothing_is_known(pack_target: Target) -> None:
    queries = 140
    start, end = random_intervals(2, queries, MANY)
    end = end.maximum(start + 60)
    want = results(IntervalMask(start, end, max_kept=MANY), pack_target, queries, MANY, False)
    got = results(IntervalMask(start, end), pack_target, queries, MANY, False)
    for one, other in zip(got, want, strict=True):
        assert not one.isnan().any()
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_packed_tiles_that_overflow(pack_target: Target) -> None:
    dtype, device = pack_target.dtypes[0], pack_target.device
    bounds = torch.tensor([0, 3, 3, 260, 300], dtype=torch.int32)
    start = torch.zeros(1, 300, dtype=torch.int32)
    end = torch.randint(1, 260, (1, 300), dtype=torch.int32)
    query, key, value = (randn(300, 2, 16, dtype=dtype, seed=s).to(device) for s in range(3))
    outs = [
        flash_dmattn_varlen_func(
            query,
            key,
            value,
            *[bounds.to(device)] * 2,
            257,
            257,
            attn_mask=IntervalMask(start, end, max_kept=max_kept).to(device),
            is_causal=True,
            backend=pack_target.backend,
        )
        for max_kept in (None, 1)
    ]
    torch.testing.assert_close(*outs, rtol=2e-2, atol=2e-2)


def test_plans_are_linear_in_the_length(pack_target: Target) -> None:
    """This holds for a causal selection of 1024 keys and for masks without a known max_kept."""
    pack = pack_for(pack_target.device, None)
    for kind, max_kept in (("keys", 0), ("intervals", 1024), ("intervals", 0)):
        short, long = (plan_bytes(pack, kind, 1, n, n, n, 1, max_kept) for n in (2**16, 2**20))
        assert long <= 16.01 * short
        # A query row of one head of 64 takes 128 bytes.
        assert long <= (2 if max_kept or kind == "keys" else 2 + 128) * 32 * 2**20


def test_what_carries_the_bound() -> None:
    bias = torch.randn(1, 2, 40)
    mask = dynamic_mask(bias, 7, True, query_length=40)
    assert isinstance(mask, IntervalMask)
    window = IntervalMask.sliding_window(3, 1, 40, 40)
    open_window = IntervalMask.sliding_window(3, None, 40, 40)
    assert (mask.max_kept, window.max_kept, open_window.max_kept) == (7, 5, None)
    assert (mask & window).max_kept == 5
    assert (open_window & mask).max_kept == 7
    assert (open_window & open_window).max_kept is None
    assert mask.to("cpu").max_kept == 7
    with pytest.raises(ValueError, match="max_kept must be at least 1, got 0"):
        IntervalMask(window.start, window.end, max_kept=0)


def test_probabilities_of_a_selection(target: Target) -> None:
    """If attention selects keys itself, the probabilities must cover the same keys."""
    dtype = target.dtypes[0]
    query, key, value = (
        randn(1, 20, 2, 16, dtype=dtype, seed=s).to(target.device) for s in range(3)
    )
    bias = randn(1, 2, 20, seed=3).to(target.device)
    out, _, probabilities = flash_dmattn_func(
        query,
        key,
        value,
        attn_bias=bias,
        is_causal=True,
        window_size=3,
        return_attn_probs=True,
        backend=target.backend,
    )
    assert ((probabilities > 0).sum(-1) <= 3).all()
    again = torch.einsum("bhqk,bkhd->bqhd", probabilities.float(), value.float())
    torch.testing.assert_close(out.float(), again, rtol=2e-2, atol=2e-2)
