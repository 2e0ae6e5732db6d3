# SPDX-License-Identifier: BSD-3-Clause
"""The gradients of query and of a bias with rows, by row blocks as in the forward pass.

A program processes all heads (and batch elements) that share its block of the bias one after
another. So it sums them in a fixed order without atomic operations. Without such a gradient
nothing is shared, and each query head has a program.
"""

import triton
import triton.language as tl

from .common import (
    INTERVALS,
    KEY_BIAS,
    RANGE,
    ROW_BIAS,
    ROWS,
    SIZES,
    dot,
    list_tile,
    load_tile,
    probabilities,
    sequence_place,
    store_tile,
    tile_counts,
    word_place,
)
from .score_block import score_block


@triton.jit(do_not_specialize=SIZES)
def row_gradients_kernel(
    q,
    k,
    v,
    bias,
    dout,
    lse,
    delta,
    dq,
    dbias,
    first,
    past,
    counts,
    columns,
    words,
    cu_q,
    cu_k,
    heads,
    group,
    rows,
    queries,
    total_keys,
    keys,
    head_dim,
    kv_batch,
    kv_row,
    kv_head,
    bias_batch,
    bias_head,
    bias_row,
    bias_key,
    bias_share,
    dbias_batch,
    dbias_head,
    dbias_row,
    list_batch,
    list_share,
    list_keys,
    list_tiles,
    share_batches,
    share_heads,
    programs,
    scale,
    softcap,
    WANT_DQ: tl.constexpr,
    WANT_DBIAS: tl.constexpr,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
    CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    VARLEN: tl.constexpr,
    GUARD: tl.constexpr,
    UNIT: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Write dq and accumulate dbias of a block of rows, for the heads that share the bias."""
    shares = heads // share_heads
    first_index = (tl.program_id(0) % programs // shares * share_batches).to(tl.int64)
    first_head = (tl.program_id(0) % shares * share_heads).to(tl.int64)
    row0 = (tl.num_programs(0) - 1 - tl.program_id(0)) // programs * BLOCK_ROWS
    head_dim *= UNIT
    kv_row *= UNIT
    tile_rows = row0 + tl.arange(0, BLOCK_ROWS)
    for share in range(share_batches * share_heads):
        index = first_index + share // share_heads
        head = first_head + share % share_heads
        batch, q_begin, q_count, k_begin, k_count = sequence_place(
            index, cu_q, cu_k, rows, queries, total_keys, keys, VARLEN
        )
        if row0 < q_count:
            causal_offset = k_count - q_count
            row_places = q_begin + tile_rows
            lse_place = (batch * heads + head) * rows + row_places
            valid_rows = tile_rows < q_count
            lse_tile = tl.load(lse + lse_place, mask=valid_rows, other=float("inf"))
            delta_tile = tl.load(delta + lse_place, mask=valid_rows, other=0.0)
            base = (batch * rows * heads + head) * head_dim
            offsets = row_places * heads * head_dim
            q_tile = load_tile(q + base, offsets, valid_rows, head_dim, False, EVEN, BLOCK_D)
            dout_tile = load_tile(dout + base, offsets, valid_rows, head_dim, False, EVEN, BLOCK_D)
            kv_place = (batch * kv_batch + head // group * kv_head) * UNIT + k_begin * kv_row
            k_base = k + kv_place
            v_base = v + kv_place
            bias_base = bias
            if BIAS == KEY_BIAS:
                bias_place = index * bias_batch + head // bias_share * bias_head
                bias_base = bias + bias_place + k_begin * bias_key
            elif BIAS == ROW_BIAS:
                bias_place = index * bias_batch + head // bias_share * bias_head
                bias_base = bias + bias_place + q_begin * bias_row
            this_list = index * list_batch + head // list_share
            tile = list_tile(this_list, list_tiles, index, q_begin, row0, VARLEN)
            first_base, past_base, columns_base, words_base = first, past, columns, words
            if KIND != RANGE:
                columns_base = columns + tile * keys
            if KIND == INTERVALS:
                first_base = first + this_list * list_keys + k_begin
                past_base = past + this_list * list_keys + k_begin
            elif KIND == ROWS:
                words_base = words + word_place(tile, row0) * keys
            count, full, full_blocks_end = tile_counts(
                counts, tile, row0, BLOCK_ROWS, q_count, k_count, BLOCK_KEYS, KIND, CAUSAL
            )
            dq_tile = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
            for partial in tl.static_range(2):
                for at0 in range(
                    partial * full_blocks_end,
                    full_blocks_end + partial * (count - full_blocks_end),
                    BLOCK_KEYS,
                ):
                    k_tile, v_tile, scores, slope, kept, cols = score_block(
                        q_tile,
                        tile_rows,
                        at0 + tl.arange(0, BLOCK_KEYS),
                        full,
                        count,
                        k_base,
                        v_base,
                        bias_base,
                        first_base,
                        past_base,
                        columns_base,
                        words_base,
                        None,
                        q_count,
                        causal_offset,
                        keys,
                        head_dim,
                        kv_row,
                        0,
                        1,
                        bias_row,
                        bias_key,
                        scale,
                        softcap,
                        partial,
                        KIND,
                        BIAS,
                        CAUSAL,
                        SOFTCAP,
                        False,
                        GUARD,
                        EVEN,
                        BLOCK_D,
                    )
                    weights = probabilities(scores, lse_tile[:, None], BIAS)
                    dweights = dot(dout_tile, tl.trans(v_tile))
                    dscores = weights * (dweights - delta_tile[:, None])
                    if WANT_DBIAS:
                        place = dbias + index // share_batches * dbias_batch
                        place += first_head // share_heads * dbias_head
                        place += row_places[:, None] * dbias_row + cols[None, :]
                        before = tl.load(place, mask=kept, other=0.0)
                        tl.store(place, before + dscores, mask=kept)
                    if WANT_DQ:
                        dproducts = (dscores * slope).to(k_tile.dtype)
                        dq_tile += dot(dproducts, k_tile)
            if WANT_DQ:
                store_tile(dq + base, offsets, dq_tile * scale, valid_rows, head_dim, BLOCK_D)
        if WANT_DBIAS:
            # The next head may add to an element in another thread than this head.
            tl.debug_barrier()
