# SPDX-License-Identifier: BSD-3-Clause
"""Inputs of the backward kernels for each row, with zeros for rows that keep no key."""

import triton
import triton.language as tl

from .common import LOG2E, SIZES, load_tile, store_tile, with_rest

# From this magnitude lse has lost the row's sum to rounding: all kept keys have a bias such as
# finfo.min. Such a row counts as empty.
UNUSABLE_LSE = tl.constexpr(1e30)
# Upper bound, in base-2 units, of the sink's part of a row's sum relative to the keys' part. Above
# it the probabilities of keys are nearly 0. They must not become 0, because the gradient of lse is
# divided by them and then multiplied by them.
MAX_SINK = tl.constexpr(64.0)


@triton.jit(do_not_specialize=SIZES)
def prepare_kernel(
    q,
    out,
    out_rest,
    dout,
    lse,
    row_sums,
    dlse,
    sink,
    live_q,
    live_dout,
    log2_lse,
    delta,
    sink_shares,
    heads,
    rows,
    total,
    head_dim,
    q_batch,
    q_row,
    q_head,
    HAS_DLSE: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    HAS_REST: tl.constexpr,
    SINK: tl.constexpr,
    UNIT: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Write query, the gradient of out, lse in units of ln 2, and sum(out * dout) - dlse.

    Rows that keep no key may be non-finite, and 0 * NaN is NaN. They are written as zeros, with an
    lse of +inf, which makes all probabilities 0. So the kernels that loop over rows need no check,
    which would serialize their loads.

    With HAS_REST, out is rounded, and out_rest is the residual.

    With HAS_SUMS, lse is the largest score in units of ln 2. The kernels then compute probabilities
    that are too large by the factor row_sums, and the written gradient is divided by it.

    With SINK, the sums that divide probabilities include the sink, and each row's part of the
    gradient of its head's sink is written. The gradient of lse, which excludes the sink, is divided
    by the sum of the keys' probabilities.
    """
    head_dim *= UNIT
    place = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    valid = place < total
    batch, row, head = place // heads // rows, place // heads % rows, place % heads
    lse_place = (batch * heads + head) * rows + row
    row_lse = tl.load(lse + lse_place, mask=valid, other=float("-inf"))
    if HAS_SUMS:
        is_live = row_lse != float("-inf")
        sums = tl.load(row_sums + lse_place, mask=is_live, other=1.0)
    else:
        is_live = tl.abs(row_lse) < UNUSABLE_LSE
        row_lse *= LOG2E
        sums = tl.full([BLOCK_ROWS], 1.0, tl.float32)
    divisor = sums
    if SINK:
        margin = tl.load(sink + head, mask=valid, other=0.0) * LOG2E - row_lse
        sink_weight = tl.exp2(tl.where(margin > MAX_SINK, MAX_SINK, margin))
        divisor = tl.where(is_live, sums + sink_weight, 1.0)
        if not HAS_SUMS:
            row_lse += tl.log2(divisor)
    tl.store(log2_lse + lse_place, tl.where(is_live, row_lse, float("inf")), mask=valid)
    offsets = place * head_dim
    q_offsets = (batch * q_batch + row * q_row + head * q_head) * UNIT
    q_tile = load_tile(q, q_offsets, is_live, head_dim, False, EVEN, BLOCK_D)
    store_tile(live_q, offsets, q_tile, valid, head_dim, BLOCK_D)
    out_tile = load_tile(out, offsets, is_live, head_dim, False, EVEN, BLOCK_D)
    dout_tile = load_tile(dout, offsets, is_live, head_dim, False, EVEN, BLOCK_D)
    exact_out = out_tile.to(tl.float32)
    if HAS_REST:
        rests = load_tile(out_rest, offsets, is_live, head_dim, False, EVEN, BLOCK_D)
        exact_out = with_rest(out_tile, rests, out.dtype.element_ty == tl.float16)
    result = tl.sum(exact_out * dout_tile.to(tl.float32), 1)
    if SINK:
        sink_share = tl.where(is_live, sink_weight / divisor * result, 0.0)
        tl.store(sink_shares + lse_place, -sink_share, mask=valid)
    if HAS_DLSE:
        result -= tl.load(dlse + lse_place, mask=is_live, other=0.0) * (divisor / sums)
    if HAS_SUMS:
        result /= divisor
        dout_tile = dout_tile.to(tl.float32) / divisor[:, None]
    store_tile(live_dout, offsets, dout_tile, valid, head_dim, BLOCK_D)
    tl.store(delta + lse_place, result, mask=valid)
