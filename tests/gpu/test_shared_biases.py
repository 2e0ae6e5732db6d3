# SPDX-License-Identifier: BSD-3-Clause
"""Biases for each query that a batch shares, at sizes that fill the tiles of the Hopper kernels.

These divide sequences into launches, and tiles or parts of tiles over the SMs. Keys that a sequence
drops hold NaN, which must not affect any result.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_dmattn import attention_reference, flash_dmattn_func
from support import HALF_TYPES, Problem, Target, assert_accurate, cotangent, rand_bool, randn


@pytest.mark.parametrize("bias_dtype", [None, torch.float32], ids=["narrow", "float32"])
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [72, 96, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_heads_of_more_than_64_columns(
    causal: bool, head_dim: int, dtype: torch.dtype, bias_dtype: torch.dtype | None, gpu: str
) -> None:
    batch, queries, keys, heads, kv_heads = 3, 250, 300, 4, 2
    query = randn(batch, queries, heads, head_dim).to(dtype)
    key, value = (randn(batch, keys, kv_heads, head_dim, seed=n).to(dtype) for n in (1, 2))
    bias = randn(1, heads, queries, keys, seed=3).to(bias_dtype or dtype)
    mask = rand_bool(batch, 1, 1, keys, density=0.8, seed=4)
    mask[..., 7] = False
    clean = Problem(query, key, value, mask, bias, causal=causal)
    dead = torch.arange(keys).view(1, keys, 1, 1) == 7
    key, value = (tensor.masked_fill(dead, torch.nan) for tensor in (key, value))
    poisoned = Problem(query, key, value, mask, bias, causal=causal)
    dout = cotangent(randn(*query.shape, seed=5)).to(dtype)
    got = poisoned.results(Target(gpu, "cuda"), dout=dout)
    assert_accurate(got, clean.truth(dout=dout), clean.eager(dout=dout))


# With 16 x 3 x 3 tiles and 20 sequences, each SM takes an equal share of the steps; twice as many
# sequences need more launches.
@pytest.mark.parametrize("batch", [20, 40])
@pytest.mark.parametrize("head_dim", [32, 64])
def test_many_sequences(head_dim: int, batch: int, gpu: str) -> None:
    length, heads = 270, 16
    shape = (batch, length, heads, head_dim)
    query, key, value = (randn(*shape, seed=n).bfloat16() for n in range(3))
    bias = randn(1, heads, length, length, seed=4)
    mask = rand_bool(batch, 1, 1, length, density=0.8, seed=5)
    check_beside_a_fixed_order(Problem(query, key, value, mask, bias), gpu)


# Rows of the mask are aligned to 16 bytes where the length is a multiple of 16.
@pytest.mark.parametrize("length", [200, 208, 1000, 1008, 2500, 2512])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_few_rows_with_a_mask_for_each_query(head_dim: int, length: int, gpu: str) -> None:
    """The keys are split, and the parts are merged."""
    query = randn(1, length, 2, head_dim).bfloat16()
    key, value = (randn(1, length, 1, head_dim, seed=n).bfloat16() for n in (1, 2))
    bias = randn(1, 1, length, length, seed=3).bfloat16()
    mask = rand_bool(1, 1, length, length, density=0.4, seed=4)
    mask[..., 17, :] = False
    check_beside_a_fixed_order(Problem(query, key, value, mask, bias, causal=True), gpu)


# Two query heads of a group share a tile of 64 rows, but not in groups of three, nor with masks of
# their own. The keys are divided with few rows, but not with many sequences. Above 2048 keys, the
# backward pass finds the live tiles of a mask first.
@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=["narrow", "float32"])
@pytest.mark.parametrize("mask_shape", [None, "keys", "head keys", "rows", "head rows"])
@pytest.mark.parametrize("heads, kv_heads", [(2, 1), (8, 2), (3, 1)])
@pytest.mark.parametrize(
    "batch, queries, keys", [(1, 1040, 2080), (20, 208, 336)], ids=["parts", "whole"]
)
def test_groups_of_heads(
    batch: int,
    queries: int,
    keys: int,
    heads: int,
    kv_heads: int,
    mask_shape: str | None,
    bias_dtype: torch.dtype,
    gpu: str,
) -> None:
    query = randn(batch, queries, heads, 64).bfloat16()
    key, value = (randn(batch, keys, kv_heads, 64, seed=n).bfloat16() for n in (1, 2))
    bias = randn(batch, kv_heads, queries, keys, seed=3).to(bias_dtype)
    mask = None
    if mask_shape is not None:
        mask_heads = heads if mask_shape.startswith("head") else kv_heads
        mask_rows = queries if mask_shape.endswith("rows") else 1
        mask = rand_bool(batch, mask_heads, mask_rows, keys, density=0.4, seed=4)
        mask[..., 40] = False
    clean = Problem(query, key, value, mask, bias, causal=True)
    if mask is not None:
        dead = torch.arange(keys).view(1, keys, 1, 1) == 40
        key, value = (tensor.masked_fill(dead, torch.nan) for tensor in (key, value))
        bias = bias.masked_fill(dead.view(1, 1, 1, keys), torch.nan)
    poisoned = Problem(query, key, value, mask, bias, causal=True)
    dout = cotangent(randn(*query.shape, seed=5)).bfloat16()
    got = poisoned.results(Target(gpu, "cuda"), dout=dout)
    assert_accurate(got, clean.truth(dout=dout), clean.eager(dout=dout))
    again = poisoned.results(Target(gpu, "cuda"), dout=dout)
    assert all(torch.equal(got[name], again[name]) for name in ("out", "lse"))


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=["narrow", "float32"])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_tiles_that_keep_nothing(head_dim: int, bias_dtype: torch.dtype, gpu: str) -> None:
    """Empty tiles of a mask are skipped; a tile with a single pair is not. Keys of skipped tiles
    may hold anything.
    """
    batch, queries, keys, heads = 2, 1100, 2192, 2
    query = randn(batch, queries, heads, head_dim).bfloat16()
    key, value = (randn(batch, keys, heads, head_dim, seed=n).bfloat16() for n in (1, 2))
    bias = randn(1, heads, queries, keys, seed=3).to(bias_dtype)
    place = torch.arange(keys) - torch.arange(queries).view(-1, 1)
    mask = ((place > 300) & (place < 500)).expand(1, 1, -1, -1).clone()
    mask[..., 900, 2100] = True
    mask[..., 128:256, :] = False
    clean = Problem(query, key, value, mask, bias)
    dead = ~mask.any(2).view(1, keys, 1, 1)
    key, value = (tensor.masked_fill(dead, torch.nan) for tensor in (key, value))
    dout = cotangent(randn(*query.shape, seed=5)).bfloat16()
    got = Problem(query, key, value, mask, bias).results(Target(gpu, "cuda"), dout=dout)
    assert_accurate(got, clean.truth(dout=dout), clean.eager(dout=dout))


def test_more_heads_of_a_bias_than_a_dimension_has_blocks(gpu: str) -> None:
    """A batch shares its bias by strides alone, so its heads exceed a grid dimension."""
    batch, heads, queries, keys, head_dim = 8256, 8, 72, 2064, 8
    query = randn(1, queries, heads, head_dim).to(gpu).half().expand(batch, -1, -1, -1)
    key, value = (
        randn(1, keys, 1, head_dim, seed=n).to(gpu).half().expand(batch, -1, -1, -1) for n in (1, 2)
    )
    bias = randn(1, 1, queries, keys, seed=3).to(gpu).half().expand(batch, heads, -1, -1)
    place = torch.arange(keys) - torch.arange(queries).view(-1, 1)
    mask = ((place > 300) & (place < 500)).to(gpu).expand(1, 1, -1, -1)
    out = flash_dmattn_func(query, key, value, mask, bias, backend="cuda")
    assert isinstance(out, Tensor)
    alone = [tensor[:1].double() for tensor in (query, key, value, bias)]
    want = attention_reference(alone[0], alone[1], alone[2], mask, alone[3])[0]
    torch.testing.assert_close(out[:1].double(), want, atol=2e-3, rtol=0)
    assert torch.equal(out, out[:1].expand_as(out))


@pytest.mark.parametrize("bias_dtype", [None, torch.float32], ids=["narrow", "float32"])
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=["float16", "bfloat16"])
@pytest.mark.parametrize("mask_kind", ["none", "keys", "rows", "causal"])
@pytest.mark.parametrize("length", [46, 49, 64])
@pytest.mark.parametrize("head_dim", [16, 32])
def test_many_windows(
    head_dim: int,
    length: int,
    mask_kind: str,
    dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    gpu: str,
) -> None:
    """Enough windows for two in a tile; their number is odd."""
    batch, heads = 351, 3
    shape = (batch, length, heads, head_dim)
    query, key, value = (randn(*shape, seed=n).to(dtype) for n in range(3))
    bias = randn(1, heads, length, length, seed=4).to(bias_dtype or dtype)
    shapes = {"keys": (batch, 1, 1, length), "rows": (1, 1, length, length)}
    mask = None
    if mask_kind in shapes:
        mask = rand_bool(*shapes[mask_kind], density=0.7, seed=5)
        mask[..., 7] = False
    causal = mask_kind == "causal"
    clean = Problem(query, key, value, mask, bias, causal=causal)
    if mask is not None:
        dead = torch.arange(length).view(1, length, 1, 1) == 7
        key, value = (tensor.masked_fill(dead, torch.nan) for tensor in (key, value))
    dout = cotangent(randn(*shape, seed=6)).to(dtype)
    problem = Problem(query, key, value, mask, bias, causal=causal)
    got = problem.results(Target(gpu, "cuda"), dout=dout)
    assert_accurate(got, clean.truth(dout=dout), clean.eager(dout=dout))


def test_odd_windows_beside_other_work(gpu: str) -> None:
    """Some thread blocks start while others find elements for the fixed-order kernels only."""
    batch, length, heads, head_dim = 351, 49, 8, 32
    shape = (batch, length, heads, head_dim)
    query, key, value = (randn(*shape, seed=n).bfloat16() for n in range(3))
    bias = randn(1, heads, length, length, seed=3)
    mask = rand_bool(batch, 1, 1, length, density=0.7, seed=4)
    mask[..., 7] = False
    clean = Problem(query, key, value, mask, bias)
    dropped = (torch.arange(length) == 7).view(1, 1, 1, length)
    odd = Problem(query, key, value, mask, bias.masked_fill(dropped, torch.nan))
    dout = cotangent(randn(*shape, seed=5)).bfloat16()
    # The GPU compares: on a CPU this would take most of the test's time.
    wanted = clean.truth(dout=dout), clean.eager(dout=dout)
    truth, eager = (on_device(results, gpu) for results in wanted)
    square = torch.zeros(512, 512, device=gpu)
    side = torch.cuda.Stream()
    for _ in range(10):
        with torch.cuda.stream(side):
            for _ in range(100):
                square = square @ square
        got = odd.results(Target(gpu, "cuda"), dout=dout)
        assert_accurate(on_device(got, gpu), truth, eager)
    torch.cuda.synchronize()


def on_device(results: dict[str, Tensor], device: str) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in results.items()}


def check_beside_a_fixed_order(problem: Problem, gpu: str) -> None:
    """Assert that errors are at most twice those of the fixed-order kernels."""
    dout = cotangent(randn(*problem.query.shape, seed=6)).to(gpu)
    assert problem.mask is not None
    mask = problem.mask.to(gpu)

    def results(kind: str) -> dict[str, Tensor]:
        leaves = problem.leaves(gpu, torch.float64 if kind == "truth" else None)
        query, key, value, bias = leaves.values()
        if kind == "truth":
            out = attention_reference(query, key, value, mask, bias, causal=problem.causal)[0]
        else:
            found = flash_dmattn_func(
                query, key, value, mask, bias, is_causal=problem.causal, backend="cuda",
                deterministic=kind == "fixed order",
            )  # fmt: skip
            assert isinstance(found, Tensor)
            out = found
        gradients = torch.autograd.grad(out, list(leaves.values()), dout.to(out.dtype))
        named = {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}
        return {name: t.detach().cpu() for name, t in {"out": out, **named}.items()}

    assert_accurate(results("ours"), results("truth"), results("fixed order"))


@pytest.mark.parametrize("bias_dtype", [None, torch.float32], ids=["narrow", "float32"])
@pytest.mark.parametrize("mask_kind", ["none", "keys", "odd", "rows", "causal"])
@pytest.mark.parametrize(
    "bias_shape", [(1, 3), (37, 3), (37, 1)], ids=["shared", "own", "of heads"]
)
@pytest.mark.parametrize("queries, keys", [(100, 128), (250, 100), (120, 256), (250, 230)])
@pytest.mark.parametrize("head_dim", [24, 64])
def test_two_tiles_at_most(
    head_dim: int,
    queries: int,
    keys: int,
    bias_shape: tuple[int, int],
    mask_kind: str,
    bias_dtype: torch.dtype | None,
    gpu: str,
) -> None:
    """Thread blocks with tiles of the same head complete the gradients among them. The fixed-order
    kernels compute a bias with NaN.
    """
    batch, heads = 37, 3
    query = randn(batch, queries, heads, head_dim).bfloat16()
    key, value = (randn(batch, keys, heads, head_dim, seed=n).bfloat16() for n in (1, 2))
    bias = randn(*bias_shape, queries, keys, seed=3).to(bias_dtype or torch.bfloat16)
    by_keys = (batch, 1, 1, keys)
    shapes = {"keys": by_keys, "odd": by_keys, "rows": (1, 1, queries, keys)}
    mask = None
    if mask_kind in shapes:
        mask = rand_bool(*shapes[mask_kind], density=0.7, seed=4)
        mask[..., 7] = False
    causal = mask_kind == "causal"
    clean = Problem(query, key, value, mask, bias, causal=causal)
    if mask is not None:
        dead = torch.arange(keys).view(1, keys, 1, 1) == 7
        key, value = (tensor.masked_fill(dead, torch.nan) for tensor in (key, value))
        if mask_kind == "odd":
            bias = bias.masked_fill(dead.view(1, 1, 1, keys), torch.nan)
    dout = cotangent(randn(*query.shape, seed=5)).bfloat16()
    problem = Problem(query, key, value, mask, bias, causal=causal)
    got = problem.results(Target(gpu, "cuda"), dout=dout)
    assert_accurate(got, clean.truth(dout=dout), clean.eager(dout=dout))


@pytest.mark.parametrize("queries, keys", [(256, 256), (100, 200), (200, 100)])
@pytest.mark.parametrize("head_dim", [32, 64])
def test_exchanged_gradients_repeat(head_dim: int, queries: int, keys: int, gpu: str) -> None:
    """Exchanged values are added in one order under any load: all gradients but dbias have equal
    bits.
    """
    batch, heads = 96, 4
    query, dout = (
        randn(batch, queries, heads, head_dim, seed=n).to(gpu).bfloat16() for n in (0, 1)
    )
    key, value = (randn(batch, keys, heads, head_dim, seed=n).to(gpu).bfloat16() for n in (2, 3))
    bias = randn(1, heads, queries, keys, seed=4).to(gpu).bfloat16()
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    out = flash_dmattn_func(*inputs, attn_bias=bias.requires_grad_(), backend="cuda")
    assert isinstance(out, Tensor)
    first = torch.autograd.grad(out, [*inputs, bias], dout, retain_graph=True)
    square = torch.zeros(1024, 1024, device=gpu)
    side = torch.cuda.Stream()
    for _ in range(50):
        with torch.cuda.stream(side):
            for _ in range(5):
                square = square @ square
        again = torch.autograd.grad(out, [*inputs, bias], dout, retain_graph=True)
        assert all(torch.equal(one, other) for one, other in zip(first[:3], again[:3], strict=True))
        torch.testing.assert_close(again[3], first[3], rtol=0.02, atol=0.02)
    torch.cuda.synchronize()


@pytest.mark.parametrize("wanted", ["all", "no bias", "no values", "no keys"])
@pytest.mark.parametrize("head_dim, length", [(32, 333), (64, 270), (128, 150)])
def test_sums_in_gradients_to_come(head_dim: int, length: int, wanted: str, gpu: str) -> None:
    """More sums than L2 holds are stored in the gradients' memory, down to a part of 16 rows."""
    batch, heads = 90, 8
    query = randn(batch, length, heads, head_dim).to(gpu).bfloat16()
    key, value = (randn(batch, length, heads, head_dim, seed=n).to(gpu).bfloat16() for n in (1, 2))
    bias = randn(1, heads, length, length, seed=3).to(gpu).bfloat16()
    mask = rand_bool(batch, 1, 1, length, density=0.7, seed=4).to(gpu)
    dout = randn(batch, length, heads, head_dim, seed=5).to(gpu).bfloat16()
    without = {"no bias": 3, "no values": 2, "no keys": 1}.get(wanted)
    tensors = [
        tensor.requires_grad_(n != without) for n, tensor in enumerate((query, key, value, bias))
    ]
    inputs = [tensor for tensor in tensors if tensor.requires_grad]

    def gradients(sequences: slice) -> tuple[Tensor, ...]:
        query, key, value = (tensor[sequences] for tensor in tensors[:3])
        out = flash_dmattn_func(query, key, value, mask[sequences], tensors[3], backend="cuda")
        return torch.autograd.grad(out, inputs, dout[sequences])

    got = gradients(slice(None))
    parts = [gradients(slice(first, first + 10)) for first in range(0, batch, 10)]
    for n, gradient in enumerate(got):
        want = torch.stack([part[n].float() for part in parts]).sum(0)
        error = (gradient.float() - want).abs().max() / want.abs().max()
        assert error < 0.02, (n, error)
