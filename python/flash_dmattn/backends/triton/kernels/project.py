# SPDX-License-Identifier: BSD-3-Clause
"""A token's projections to heads, normalised and rotated. Of one token they are vectors."""

import triton
import triton.language as tl

# They differ from call to call; Triton would compile again for each that is 1 or a multiple of 16.
SIZES = ["x_row"]


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
    frequency,
    start,
    query,
    key,
    value,
    query_eps,
    key_eps,
    x_row,
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
    """Compute a head of a token, rounding where PyTorch's operations round.

    A program has one head: first come those of the queries, then keys, then values, which are
    neither normalised nor rotated. Of a head the two halves are computed side by side, as an
    element is rotated with the one that stands half a head away.
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
    if tl.program_id(0) < (HEADS + KV_HEADS) * (NORM or TURN):
        one, other = first.to(tl.float32), second.to(tl.float32)
        if NORM:
            scale = tl.rsqrt((tl.sum(one * one, 0) + tl.sum(other * other, 0)) / DIM + eps)
            one *= scale * tl.load(norm + element, is_first, 0.0).to(tl.float32)
            other *= scale * tl.load(norm + HALF + element, is_second, 0.0).to(tl.float32)
            one, other = one.to(dtype).to(tl.float32), other.to(dtype).to(tl.float32)
        if TURN:
            angle = tl.load(start).to(tl.float32) * tl.load(frequency + element, is_first, 0.0)
            cos, sin = tl.cos(angle), tl.sin(angle)
            turned = one * cos - other * sin
            other = other * cos + one * sin
            one = turned
        first, second = one.to(dtype), other.to(dtype)
    to = result + (row * heads + head) * DIM + element
    tl.store(to, first, is_first)
    tl.store(to + HALF, second, is_second)
