# SPDX-License-Identifier: BSD-3-Clause
"""What a layer does with the heads of queries and keys between its projections and attention."""

import triton
import triton.language as tl

# They differ from call to call; Triton would compile again for each that is 1 or a multiple of 16.
SIZES = ["tokens", "query_row", "key_row"]


@triton.jit(do_not_specialize=SIZES)
def prepare_heads(
    query,
    key,
    query_weight,
    key_weight,
    frequency,
    start,
    query_out,
    key_out,
    query_eps,
    key_eps,
    tokens,
    query_row,
    key_row,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    TURN: tl.constexpr,
):
    """Normalise and rotate a head of a token, rounding where PyTorch's operations round.

    A program has one head: first come those of the queries, then those of the keys.
    """
    row = (tl.program_id(0) // (HEADS + KV_HEADS)).to(tl.int64)
    head = tl.program_id(0) % (HEADS + KV_HEADS)
    element = tl.arange(0, BLOCK)
    inside = element < DIM
    # Of a pair of elements the one that the other is turned with.
    partner = tl.where(element < DIM // 2, element + DIM // 2, element - DIM // 2)
    given, given_weight, eps, result = query + row * query_row, query_weight, query_eps, query_out
    at = (row * HEADS + head) * DIM
    if head >= HEADS:
        head -= HEADS
        given, given_weight, eps, result = key + row * key_row, key_weight, key_eps, key_out
        at = (row * KV_HEADS + head) * DIM
    given += head * DIM
    dtype = query.dtype.element_ty
    own = tl.load(given + element, inside, 0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(own * own, 0) / DIM + eps)
        own *= scale * tl.load(given_weight + element, inside, 0.0).to(tl.float32)
        own = own.to(dtype).to(tl.float32)
    if TURN:
        other = tl.load(given + partner, inside, 0.0).to(tl.float32)
        if NORM:
            other *= scale * tl.load(given_weight + partner, inside, 0.0).to(tl.float32)
            other = other.to(dtype).to(tl.float32)
        position = (tl.load(start) + row % tokens).to(tl.float32)
        angle = position * tl.load(frequency + element % (DIM // 2), inside, 0.0)
        sign = tl.where(element < DIM // 2, -1.0, 1.0)
        own = own * tl.cos(angle) + other * (sign * tl.sin(angle))
    tl.store(result + at + element, own.to(dtype), inside)
