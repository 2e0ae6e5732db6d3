# SPDX-License-Identifier: BSD-3-Clause
"""Hypothesis strategies for attention problems: shapes, broadcasts, strides, masks, dtypes."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

import flash_dmattn
from support import Problem

HEAD_DIMS = (1, 3, 16, 40, 64, 100, 128, 256)
# Around the tile sizes of kernels (8 to 128 rows or keys), and 0.
LENGTHS = st.one_of(st.integers(0, 40), st.sampled_from([63, 64, 65, 127, 128, 129, 200]))


@st.composite
def problems(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...]) -> Problem:
    """Draw a problem; only its shapes and kinds are drawn, the values follow from a seed."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    dtype = draw(st.sampled_from(dtypes))
    batch, kv_heads, group = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
    )
    queries, keys = draw(LENGTHS), draw(LENGTHS)
    head_dim = draw(st.sampled_from(HEAD_DIMS))
    heads = kv_heads * group

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    causal = draw(st.booleans())
    sizes = (batch, (kv_heads, heads), queries, keys)
    return Problem(
        strided(draw, random(batch, queries, heads, head_dim)),
        strided(draw, random(batch, keys, kv_heads, head_dim)),
        strided(draw, random(batch, keys, kv_heads, head_dim)),
        draw(masks(sizes, generator)),
        draw(biases(sizes, dtype, generator)),
        causal,
        draw(st.sampled_from([0.0, 0.0, 2.0, 30.0])),
        draw(st.sampled_from([None, None, 0.3])),
    )


@st.composite
def masks(
    draw: st.DrawFn, sizes: tuple[int, tuple[int, int], int, int], generator: torch.Generator
) -> Tensor | flash_dmattn.IntervalMask | None:
    kind = draw(st.sampled_from(["none", "bool", "bool", "intervals", "intervals"]))
    if kind == "none":
        return None
    batch, _, queries, keys = sizes
    if kind == "bool":
        shape = draw(shapes(sizes))
        density = draw(st.sampled_from([0.0, 0.05, 0.5, 0.9, 1.0]))
        kept = torch.rand(shape, generator=generator) < density
        return strided(draw, expanded(draw, kept, sizes))
    heads = draw(st.sampled_from([1, *sizes[1]]))
    shape = (draw(st.sampled_from([1, batch])), heads, keys)
    # Also before the first row and past the last, and ends before starts.
    bounds = [
        torch.randint(-2, queries + 3, shape, generator=generator, dtype=torch.int32)
        for _ in range(2)
    ]
    if draw(st.booleans()):
        bounds = [torch.minimum(*bounds), torch.maximum(*bounds)]
    return flash_dmattn.IntervalMask(*bounds)


@st.composite
def biases(
    draw: st.DrawFn,
    sizes: tuple[int, tuple[int, int], int, int],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Tensor | None:
    if draw(st.booleans()):
        return None
    bias = torch.randn(draw(shapes(sizes)), generator=generator)
    bias = bias.to(draw(st.sampled_from([dtype, torch.float32])))
    if draw(st.integers(0, 3)) == 0:
        bias.masked_fill_(torch.rand(bias.shape, generator=generator) < 0.3, -torch.inf)
    return strided(draw, expanded(draw, bias, sizes))


@st.composite
def shapes(draw: st.DrawFn, sizes: tuple[int, tuple[int, int], int, int]) -> tuple[int, ...]:
    """Draw a shape of a mask or bias: 2, 3 or 4 dimensions, any of them broadcast."""
    batch, heads, queries, keys = sizes
    head_size = draw(st.sampled_from([1, *heads]))
    rank = draw(st.sampled_from([2, 3, 4, 4, 4]))
    if rank == 2:
        return (batch, keys)
    if rank == 3:
        return (batch, head_size, keys)
    return (
        draw(st.sampled_from([1, batch])),
        head_size,
        draw(st.sampled_from([1, queries])),
        draw(st.sampled_from([1, keys, keys])),
    )


def expanded(
    draw: st.DrawFn, tensor: Tensor, sizes: tuple[int, tuple[int, int], int, int]
) -> Tensor:
    """Expand some broadcast dimensions of a 4-D tensor: the same meaning with stride 0."""
    if tensor.dim() != 4 or not draw(st.booleans()):
        return tensor
    batch, (_, heads), queries, keys = sizes
    target = (batch, heads, queries, keys)
    return tensor.expand(
        [
            full if size == 1 and draw(st.booleans()) else size
            for size, full in zip(tensor.shape, target, strict=True)
        ]
    )


def strided(draw: st.DrawFn, tensor: Tensor) -> Tensor:
    """Give the same values other strides."""
    kind = draw(st.sampled_from(["dense", "dense", "sliced", "transposed"]))
    if kind == "dense" or 0 in tensor.stride() or tensor.dim() == 0:
        return tensor
    if kind == "sliced":
        base = tensor.new_zeros(
            [size + 1 for size in tensor.shape[:-1]] + [2 * tensor.shape[-1] + 1]
        )
        view = base[(*[slice(1, None)] * (tensor.dim() - 1), slice(1, None, 2))]
        return view.copy_(tensor)
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)
