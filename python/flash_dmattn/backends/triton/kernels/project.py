# SPDX-License-Identifier: BSD-3-Clause
"""Projections of single tokens to heads, with normalization and rotation, as vector products."""

import triton
import triton.language as tl

# These differ from call to call. Triton would recompile for each that is 1 or a multiple of 16.
SIZES = ["x_row", "turn_row"]

# Normalization of a head: none; that of nn.RMSNorm; or that of transformers' models, which round
# before the product with the weight.
NO_NORM = tl.constexpr(0)
RMS_NORM = tl.constexpr(1)
ROUNDED_NORM = tl.constexpr(2)
# Rotation: none; by a frequency per pair and the token's position, in float32; or by cosines and
# sines of the tokens' dtype, with each product rounded.
NO_TURN = tl.constexpr(0)
BY_POSITION = tl.constexpr(1)
BY_COSINES = tl.constexpr(2)


@triton.jit
def _rounded_sum(one, other, dtype: tl.constexpr):
    return one.to(dtype).to(tl.float32) + other.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def project_heads(
    x,
    query_weight,
    key_weight,
    value_weight,
    query_bias,
    key_bias,
    value_bias,
    query_norm,
    key_norm,
    turn,
    other_turn,
    query,
    key,
    value,
    query_eps,
    key_eps,
    x_row,
    turn_row,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
    NORM: tl.constexpr,
    TURN: tl.constexpr,
):
    """Compute a head of a token, with the rounding of PyTorch's operations.

    A program has one head: first those of the queries, then keys, then values, which are neither
    normalized nor rotated. The two halves of a head are computed separately, because each element
    is rotated with the element half a head away. ``turn`` and ``other_turn`` are the frequencies
    and the position, or the cosines and the sines ``(B, DIM)``.
    """
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    dtype = x.dtype.element_ty
    weight, bias, norm, eps, result = query_weight, query_bias, query_norm, query_eps, query
    heads = HEADS
    if head >= HEADS + KV_HEADS:
        head -= HEADS + KV_HEADS
        weight, bias, result = value_weight, value_bias, value
        heads = KV_HEADS
    elif head >= HEADS:
        head -= HEADS
        weight, bias, norm, eps, result = key_weight, key_bias, key_norm, key_eps, key
        heads = KV_HEADS
    element = tl.arange(0, BLOCK_HALF)
    is_first, is_second = element < HALF, element < DIM - HALF
    lines = weight + (head * DIM + element[:, None]).to(tl.int64) * WIDTH
    first = tl.zeros((BLOCK_HALF,), tl.float32)
    second = tl.zeros((BLOCK_HALF,), tl.float32)
    for begin in range(0, WIDTH, BLOCK_WIDTH):
        column = begin + tl.arange(0, BLOCK_WIDTH)
        inside = column < WIDTH
        part = tl.load(x + row * x_row + column, inside, 0.0).to(tl.float32)[None, :]
        w = tl.load(lines + column[None, :], is_first[:, None] & inside[None, :], 0.0)
        first += tl.sum(w.to(tl.float32) * part, 1)
        w = tl.load(
            lines + HALF * WIDTH + column[None, :], is_second[:, None] & inside[None, :], 0.0
        )
        second += tl.sum(w.to(tl.float32) * part, 1)
    if BIASED:
        first += tl.load(bias + head * DIM + element, is_first, 0.0).to(tl.float32)
        second += tl.load(bias + head * DIM + HALF + element, is_second, 0.0).to(tl.float32)
    first, second = first.to(dtype), second.to(dtype)
    if tl.program_id(0) < (HEADS + KV_HEADS) * (NORM != NO_NORM or TURN != NO_TURN):
        one, other = first.to(tl.float32), second.to(tl.float32)
        if NORM != NO_NORM:
            scale = tl.rsqrt((tl.sum(one * one, 0) + tl.sum(other * other, 0)) / DIM + eps)
            one, other = one * scale, other * scale
            if NORM == ROUNDED_NORM:
                one, other = one.to(dtype).to(tl.float32), other.to(dtype).to(tl.float32)
            one *= tl.load(norm + element, is_first, 0.0).to(tl.float32)
            other *= tl.load(norm + HALF + element, is_second, 0.0).to(tl.float32)
            one, other = one.to(dtype).to(tl.float32), other.to(dtype).to(tl.float32)
        if TURN == BY_POSITION:
            angle = tl.load(other_turn).to(tl.float32) * tl.load(turn + element, is_first, 0.0)
            cos, sin = tl.cos(angle), tl.sin(angle)
            turned = one * cos - other * sin
            other = other * cos + one * sin
            one = turned
        if TURN == BY_COSINES:
            cos, sin = turn + row * turn_row + element, other_turn + row * turn_row + element
            turned = _rounded_sum(
                one * tl.load(cos, is_first, 0.0), -other * tl.load(sin, is_first, 0.0), dtype
            )
            other = _rounded_sum(
                other * tl.load(cos + HALF, is_second, 0.0),
                one * tl.load(sin + HALF, is_second, 0.0),
                dtype,
            )
            one = turned
        first, second = one.to(dtype), other.to(dtype)
    to = result + (row * heads + head) * DIM + element
    tl.store(to, first, is_first)
    tl.store(to + HALF, second, is_second)
