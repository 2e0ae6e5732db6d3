# SPDX-License-Identifier: BSD-3-Clause
"""Projections of single tokens to heads, with normalization and rotation, as vector products."""

import triton
import triton.language as tl

# These differ from call to call. Triton would recompile for each that is 1 or a multiple of 16.
SIZES = ["x_row", "rotary_row"]

# Normalization of a head: none; that of nn.RMSNorm; or that of transformers' models, which round
# before the product with the weight.
NO_NORM = tl.constexpr(0)
RMS_NORM = tl.constexpr(1)
ROUNDED_NORM = tl.constexpr(2)
# Rotation: none; by a frequency per pair and the token's position, in float32; or by cosines and
# sines of the tokens' dtype, with each product rounded.
NO_ROTARY = tl.constexpr(0)
ROTARY_BY_POSITION = tl.constexpr(1)
ROTARY_BY_COSINES = tl.constexpr(2)


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
    frequencies_or_cos,
    position_or_sin,
    query,
    key,
    value,
    query_eps,
    key_eps,
    x_row,
    rotary_row,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
    NORM: tl.constexpr,
    ROTARY: tl.constexpr,
):
    """Compute a head of a token, with the rounding of PyTorch's operations.

    A program has one head: first those of the queries, then keys, then values, which are neither
    normalized nor rotated. The two halves of a head are computed separately, because each element
    is rotated with the element half a head away. Cosines and sines are ``(B, DIM)``.
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
    weight_rows = weight + (head * DIM + element[:, None]).to(tl.int64) * WIDTH
    first = tl.zeros((BLOCK_HALF,), tl.float32)
    second = tl.zeros((BLOCK_HALF,), tl.float32)
    for begin in range(0, WIDTH, BLOCK_WIDTH):
        column = begin + tl.arange(0, BLOCK_WIDTH)
        is_column = column < WIDTH
        part = tl.load(x + row * x_row + column, is_column, 0.0).to(tl.float32)[None, :]
        block = tl.load(weight_rows + column[None, :], is_first[:, None] & is_column[None, :], 0.0)
        first += tl.sum(block.to(tl.float32) * part, 1)
        block = tl.load(
            weight_rows + HALF * WIDTH + column[None, :],
            is_second[:, None] & is_column[None, :],
            0.0,
        )
        second += tl.sum(block.to(tl.float32) * part, 1)
    if BIASED:
        first += tl.load(bias + head * DIM + element, is_first, 0.0).to(tl.float32)
        second += tl.load(bias + head * DIM + HALF + element, is_second, 0.0).to(tl.float32)
    first, second = first.to(dtype), second.to(dtype)
    if tl.program_id(0) < (HEADS + KV_HEADS) * (NORM != NO_NORM or ROTARY != NO_ROTARY):
        x1, x2 = first.to(tl.float32), second.to(tl.float32)
        if NORM != NO_NORM:
            scale = tl.rsqrt((tl.sum(x1 * x1, 0) + tl.sum(x2 * x2, 0)) / DIM + eps)
            x1, x2 = x1 * scale, x2 * scale
            if NORM == ROUNDED_NORM:
                x1, x2 = x1.to(dtype).to(tl.float32), x2.to(dtype).to(tl.float32)
            x1 *= tl.load(norm + element, is_first, 0.0).to(tl.float32)
            x2 *= tl.load(norm + HALF + element, is_second, 0.0).to(tl.float32)
            x1, x2 = x1.to(dtype).to(tl.float32), x2.to(dtype).to(tl.float32)
        if ROTARY == ROTARY_BY_POSITION:
            angle = tl.load(position_or_sin).to(tl.float32) * tl.load(
                frequencies_or_cos + element, is_first, 0.0
            )
            cos, sin = tl.cos(angle), tl.sin(angle)
            rotated = x1 * cos - x2 * sin
            x2 = x2 * cos + x1 * sin
            x1 = rotated
        if ROTARY == ROTARY_BY_COSINES:
            offsets = row * rotary_row + element
            cos, sin = frequencies_or_cos + offsets, position_or_sin + offsets
            rotated = _rounded_sum(
                x1 * tl.load(cos, is_first, 0.0), -x2 * tl.load(sin, is_first, 0.0), dtype
            )
            x2 = _rounded_sum(
                x2 * tl.load(cos + HALF, is_second, 0.0),
                x1 * tl.load(sin + HALF, is_second, 0.0),
                dtype,
            )
            x1 = rotated
        first, second = x1.to(dtype), x2.to(dtype)
    head_result = result + (row * heads + head) * DIM + element
    tl.store(head_result, first, is_first)
    tl.store(head_result + HALF, second, is_second)
