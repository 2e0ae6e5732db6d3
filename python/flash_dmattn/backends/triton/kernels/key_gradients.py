# SPDX-License-Identifier: BSD-3-Clause
"""The gradients of key and value, and of a per-key bias, by key blocks.

A program loops over the rows that keep any key of its block, for some query heads of a group. If a
block is divided into parts, each part writes its own float32 sums.
"""

import triton
import triton.language as tl

from .common import (
    INTERVALS,
    KEY_BIAS,
    ROW_BIAS,
    ROWS,
    SIZES,
    WORD_ROWS,
    capped_scores,
    dot,
    kept_intervals,
    list_tile,
    load_tile,
    probabilities,
    scaled_bias,
    sequence_place,
    store_tile,
    word_place,
)


@triton.jit(do_not_specialize=SIZES)
def key_gradients_kernel(
    q,
    k,
    v,
    bias,
    dout,
    lse,
    delta,
    dk,
    dv,
    dbias,
    first,
    past,
    ordered,
    kept_count,
    words,
    cu_q,
    cu_k,
    heads,
    kv_heads,
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
    list_batch,
    list_share,
    list_keys,
    list_tiles,
    sequences,
    row_parts,
    part_heads,
    programs,
    scale,
    softcap,
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
    """Write dk, dv and dbias of a part of a key block. ``programs`` is B * Hk."""
    head_dim *= UNIT
    kv_row *= UNIT
    group = heads // kv_heads
    parts = group // part_heads * row_parts
    part = tl.program_id(0) // programs % parts
    row_part = part % row_parts
    index = (tl.program_id(0) % programs // kv_heads).to(tl.int64)
    kv_index = (tl.program_id(0) % kv_heads).to(tl.int64)
    first_head = kv_index * group + part // row_parts * part_heads
    batch, q_begin, q_count, k_begin, k_count = sequence_place(
        index, cu_q, cu_k, rows, queries, total_keys, keys, VARLEN
    )
    causal_offset = k_count - q_count
    this_list = index * list_batch + first_head // list_share
    base = this_list * list_keys + k_begin
    count = k_count
    if KIND == INTERVALS:
        count = tl.load(kept_count + this_list * sequences + (index if VARLEN else 0))
    at0 = tl.program_id(0) // programs // parts * BLOCK_KEYS
    if at0 < count:
        cols = at0 + tl.arange(0, BLOCK_KEYS)
        valid = cols < count
        if KIND == INTERVALS:
            cols = tl.load(ordered + base + cols, mask=valid, other=0)
            first += base
            past += base
        if KIND == ROWS:
            first_row, past_row = cols * 0, cols * 0
            begin, end = 0, q_count
        else:
            first_row, past_row = kept_intervals(
                cols, valid, first, past, q_count, causal_offset, KIND, CAUSAL
            )
            begin = tl.min(tl.where(valid, first_row, q_count), 0)
            end = tl.max(past_row, 0)
        kv_place = (batch * kv_batch + kv_index * kv_head) * UNIT + k_begin * kv_row
        kv_offsets = cols.to(tl.int64) * kv_row
        k_tile = load_tile(k + kv_place, kv_offsets, valid, head_dim, False, EVEN, BLOCK_D)
        v_tile = load_tile(v + kv_place, kv_offsets, valid, head_dim, False, EVEN, BLOCK_D)
        dk_tile = tl.zeros([BLOCK_KEYS, BLOCK_D], tl.float32)
        dv_tile = tl.zeros([BLOCK_KEYS, BLOCK_D], tl.float32)
        for part_head in range(part_heads):
            head = first_head + part_head
            bias_base = bias
            added = tl.zeros([BLOCK_KEYS], tl.float32)
            if BIAS == KEY_BIAS:
                bias_place = index * bias_batch + head // bias_share * bias_head
                bias_base = bias + bias_place + k_begin * bias_key
                added = tl.load(bias_base + cols.to(tl.int64) * bias_key, mask=valid, other=0.0)
            elif BIAS == ROW_BIAS:
                bias_place = index * bias_batch + head // bias_share * bias_head
                bias_base = bias + bias_place + q_begin * bias_row
            is_kept_by_bias = valid & (added != float("-inf"))
            added = scaled_bias(added)
            row_base = (batch * rows * heads + head) * head_dim
            lse_base = (batch * heads + head) * rows
            dbias_tile = tl.zeros([BLOCK_KEYS], tl.float32)
            for row0 in range(
                begin // BLOCK_ROWS * BLOCK_ROWS + row_part * BLOCK_ROWS,
                end,
                row_parts * BLOCK_ROWS,
            ):
                tile_rows = row0 + tl.arange(0, BLOCK_ROWS)
                kept = (first_row[:, None] <= tile_rows[None, :]) & (
                    tile_rows[None, :] < past_row[:, None]
                )
                any_kept = True
                if KIND == ROWS:
                    tile = list_tile(this_list, list_tiles, index, q_begin, row0, VARLEN)
                    word_base = words + word_place(tile, row0) * keys
                    word = tl.load(word_base + cols, mask=valid, other=0)
                    bit = (tile_rows % WORD_ROWS).to(tl.int64)
                    kept = ((word[:, None] >> bit[None, :]) & 1) != 0
                    any_kept = tl.max((word != 0).to(tl.int32), 0) != 0
                if any_kept:
                    if GUARD:
                        kept &= is_kept_by_bias[:, None]
                    row_places = q_begin + tile_rows
                    valid_rows = tile_rows < q_count
                    lse_place = lse_base + row_places
                    lse_tile = tl.load(lse + lse_place, mask=valid_rows, other=float("inf"))
                    delta_tile = tl.load(delta + lse_place, mask=valid_rows, other=0.0)
                    offsets = row_places * heads * head_dim
                    q_tile = load_tile(
                        q + row_base, offsets, valid_rows, head_dim, False, EVEN, BLOCK_D
                    )
                    dout_tile = load_tile(
                        dout + row_base, offsets, valid_rows, head_dim, False, EVEN, BLOCK_D
                    )
                    products = dot(k_tile, tl.trans(q_tile))
                    scores, slope = capped_scores(products, scale, softcap, SOFTCAP)
                    if BIAS == KEY_BIAS:
                        scores += added[:, None]
                    elif BIAS == ROW_BIAS:
                        places = tile_rows.to(tl.int64)[None, :] * bias_row
                        places += cols.to(tl.int64)[:, None] * bias_key
                        row_added = tl.load(bias_base + places, mask=kept, other=float("-inf"))
                        row_added = row_added.to(tl.float32)
                        kept &= row_added != float("-inf")
                        scores += scaled_bias(row_added)
                    scores = tl.where(kept, scores, float("-inf"))
                    weights = probabilities(scores, lse_tile[None, :], BIAS)
                    dv_tile += dot(weights.to(dout_tile.dtype), dout_tile)
                    dweights = dot(v_tile, tl.trans(dout_tile))
                    dscores = weights * (dweights - delta_tile[None, :])
                    if GUARD or KIND == ROWS:
                        # Keys that the bias drops or that no row keeps may be non-finite.
                        dscores = tl.where(kept, dscores, 0.0)
                    if WANT_DBIAS:
                        dbias_tile += tl.sum(dscores, 1)
                    dproducts = dscores * slope
                    if SOFTCAP and (GUARD or KIND == ROWS):
                        dproducts = tl.where(kept, dproducts, 0.0)
                    dk_tile += dot(dproducts.to(q_tile.dtype), q_tile)
            if WANT_DBIAS:
                place = (row_part * (programs // kv_heads) + index) * heads + head
                if VARLEN:
                    place = row_part * heads + head
                tl.store(dbias + place * total_keys + k_begin + cols, dbias_tile, mask=valid)
        batches = programs // kv_heads
        if VARLEN:
            batches = batches * 0 + 1
        place = ((part * batches + batch) * total_keys + k_begin) * kv_heads + kv_index
        places = cols.to(tl.int64) * (kv_heads * head_dim)
        store_tile(dk + place * head_dim, places, dk_tile * scale, valid, head_dim, BLOCK_D)
        store_tile(dv + place * head_dim, places, dv_tile, valid, head_dim, BLOCK_D)
