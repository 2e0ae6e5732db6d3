# SPDX-License-Identifier: BSD-3-Clause
"""What the backward passes need of each row of out and its gradient."""

import triton
import triton.language as tl

from .common import SIZES, load_tile


@triton.jit(do_not_specialize=SIZES)
def delta_kernel(
    out,
    dout,
    dlse,
    delta,
    heads,
    rows,
    total,
    head_dim,
    HAS_DLSE: tl.constexpr,
    UNIT: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Write sum(out * dout) - dlse of each row and head, in the order of lse.

    Of a row that keeps nothing it may be anything, and is not read.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    valid = place < total
    head_dim *= UNIT
    offsets = place * head_dim
    out_tile = load_tile(out, offsets, valid, head_dim, False, EVEN, BLOCK_D).to(tl.float32)
    dout_tile = load_tile(dout, offsets, valid, head_dim, False, EVEN, BLOCK_D).to(tl.float32)
    result = tl.sum(out_tile * dout_tile, 1)
    row, head = place // heads % rows, place % heads
    lse_place = (place // heads // rows * heads + head) * rows + row
    if HAS_DLSE:
        result -= tl.load(dlse + lse_place, mask=valid, other=0.0)
    tl.store(delta + lse_place, result, mask=valid)
