# SPDX-License-Identifier: BSD-3-Clause
"""The forward pass: each program computes a row block of one query head over a tile's columns."""

import triton
import triton.language as tl

from .common import (
    INTERVALS,
    KEY_BIAS,
    LN2,
    LOG2E,
    RANGE,
    ROW_BIAS,
    ROWS,
    SIZES,
    dot,
    forward_shift,
    list_tile,
    load_tile,
    rest_of,
    sequence_place,
    store_tile,
    tile_counts,
    word_place,
)
from .score_block import score_block


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q,
    k,
    v,
    bias,
    sink,
    out,
    out_rest,
    lse,
    first,
    past,
    counts,
    columns,
    words,
    cu_q,
    cu_k,
    table,
    heads,
    group,
    batch_heads,
    rows,
    queries,
    total_keys,
    keys,
    head_dim,
    q_batch,
    q_row,
    q_head,
    kv_batch,
    kv_row,
    kv_head,
    kv_page,
    page,
    page_batch,
    bias_batch,
    bias_head,
    bias_row,
    bias_key,
    bias_share,
    list_batch,
    list_share,
    list_keys,
    list_tiles,
    scale,
    softcap,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
    CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    VARLEN: tl.constexpr,
    PAGED: tl.constexpr,
    GUARD: tl.constexpr,
    UNIT: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    SINK: tl.constexpr,
    STATISTICS: tl.constexpr,
    HAS_REST: tl.constexpr,
):
    """Write out and lse of a block of rows. The last rows, which may see the most, come first.

    With HAS_REST, also write out's rounding residual.

    With STATISTICS, write the largest score in units of ln 2 to lse instead, and the sum of
    exp2(score - largest) to out, as float32 of lse's shape.
    """
    index = (tl.program_id(0) % batch_heads // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    row0 = (tl.num_programs(0) - 1 - tl.program_id(0)) // batch_heads * BLOCK_ROWS
    batch, q_begin, q_count, k_begin, k_count = sequence_place(
        index, cu_q, cu_k, rows, queries, total_keys, keys, VARLEN
    )
    if row0 < q_count:
        head_dim *= UNIT
        causal_offset = k_count - q_count
        tile_rows = row0 + tl.arange(0, BLOCK_ROWS)
        valid_rows = tile_rows < q_count
        row_places = q_begin + tile_rows
        q_tile = load_tile(
            q + (batch * q_batch + head * q_head) * UNIT,
            row_places * (q_row * UNIT),
            valid_rows,
            head_dim,
            False,
            EVEN,
            BLOCK_D,
        )
        kv_row *= UNIT
        kv_page *= UNIT
        kv_offset = (batch * kv_batch + head // group * kv_head) * UNIT
        if PAGED:
            table += index * page_batch
        else:
            kv_offset += k_begin * kv_row
        k += kv_offset
        v += kv_offset
        if BIAS == KEY_BIAS:
            bias += index * bias_batch + head // bias_share * bias_head + k_begin * bias_key
        elif BIAS == ROW_BIAS:
            bias += index * bias_batch + head // bias_share * bias_head + q_begin * bias_row
        this_list = index * list_batch + head // list_share
        tile = list_tile(this_list, list_tiles, index, q_begin, row0, VARLEN)
        if KIND != RANGE:
            columns += tile * keys
        if KIND == INTERVALS:
            first += this_list * list_keys + k_begin
            past += this_list * list_keys + k_begin
        elif KIND == ROWS:
            words += word_place(tile, row0) * keys
        count, full, full_blocks_end = tile_counts(
            counts, tile, row0, BLOCK_ROWS, q_count, k_count, BLOCK_KEYS, KIND, CAUSAL
        )
        row_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_ROWS], tl.float32)
        out_tile = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
        # First the columns that all rows keep, then the rest.
        for partial in tl.static_range(2):
            for at0 in range(
                partial * full_blocks_end,
                full_blocks_end + partial * (count - full_blocks_end),
                BLOCK_KEYS,
            ):
                _, v_tile, scores, _, _, _ = score_block(
                    q_tile,
                    tile_rows,
                    at0 + tl.arange(0, BLOCK_KEYS),
                    full,
                    count,
                    k,
                    v,
                    bias,
                    first,
                    past,
                    columns,
                    words,
                    table,
                    q_count,
                    causal_offset,
                    keys,
                    head_dim,
                    kv_row,
                    kv_page,
                    page,
                    bias_row,
                    bias_key,
                    scale,
                    softcap,
                    partial,
                    KIND,
                    BIAS,
                    CAUSAL,
                    SOFTCAP,
                    PAGED,
                    GUARD,
                    EVEN,
                    BLOCK_D,
                )
                new_max = tl.maximum(row_max, tl.max(scores, 1))
                shift = forward_shift(new_max)
                weights = tl.exp2(scores - shift[:, None])
                rescale = tl.exp2(row_max - shift)
                row_sum = row_sum * rescale + tl.sum(weights, 1)
                out_tile = out_tile * rescale[:, None]
                out_tile += dot(weights.to(v_tile.dtype), v_tile)
                row_max = new_max
        lse_places = (batch * heads + head) * rows + row_places
        if STATISTICS:
            tl.store(lse + lse_places, row_max, mask=valid_rows)
            tl.store(out + lse_places, row_sum, mask=valid_rows)
        else:
            tl.store(lse + lse_places, (row_max + tl.log2(row_sum)) * LN2, mask=valid_rows)
            empty = row_sum == 0
            if SINK:  # lse excludes the sink
                row_sum += tl.exp2(tl.load(sink + head) * LOG2E - row_max)
            out_tile = tl.where(empty[:, None], 0.0, out_tile / row_sum[:, None])
            offsets = ((batch * rows + row_places) * heads + head) * head_dim
            store_tile(out, offsets, out_tile, valid_rows, head_dim, BLOCK_D)
            if HAS_REST:
                rounded = out_tile.to(out.dtype.element_ty).to(tl.float32)
                rests = rest_of(out_tile, rounded, out.dtype.element_ty == tl.float16)
                store_tile(out_rest, offsets, rests, valid_rows, head_dim, BLOCK_D)
