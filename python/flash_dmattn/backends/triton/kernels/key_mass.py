# SPDX-License-Identifier: BSD-3-Clause
"""The attention that each key received, by key blocks over the rows that keep any of their keys.

A program has one query head. If a block's rows are divided, each part writes its own sums.
"""

import triton
import triton.language as tl

from .common import (
    INTERVALS,
    KEY_BIAS,
    LOG2E,
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
    row_shifts,
    scaled_bias,
    sequence_place,
    word_place,
)


@triton.jit
def kept_pairs(tile_rows, first_row, past_row):
    """Return the kept pairs of intervals as (key, row)."""
    return (first_row[:, None] <= tile_rows[None, :]) & (tile_rows[None, :] < past_row[:, None])


@triton.jit(do_not_specialize=SIZES)
def key_mass_kernel(
    q,
    k,
    bias,
    sink,
    lse,
    row_sums,
    mass,
    first,
    past,
    ordered,
    kept_count,
    words,
    cu_q,
    cu_k,
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
    scale,
    softcap,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
    CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    VARLEN: tl.constexpr,
    UNIT: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    SINK: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Write the sums of a part of a key block, float32 ``(row_parts, batch, heads, keys)``."""
    head_dim *= UNIT
    kv_row *= UNIT
    index = (tl.program_id(0) % batch_heads // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    row_part = tl.program_id(0) // batch_heads % row_parts
    batch, q_begin, q_count, k_begin, k_count = sequence_place(
        index, cu_q, cu_k, rows, queries, total_keys, keys, VARLEN
    )
    causal_offset = k_count - q_count
    this_list = index * list_batch + head // list_share
    base = this_list * list_keys + k_begin
    count = k_count
    if KIND == INTERVALS:
        count = tl.load(kept_count + this_list * sequences + (index if VARLEN else 0))
    at0 = tl.program_id(0) // batch_heads // row_parts * BLOCK_KEYS
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
        bias_place = index * bias_batch + head // bias_share * bias_head
        is_kept_by_bias = valid
        added = tl.zeros([BLOCK_KEYS], tl.float32)
        if BIAS == KEY_BIAS:
            bias += bias_place + k_begin * bias_key
            added = tl.load(bias + cols.to(tl.int64) * bias_key, mask=valid, other=0.0)
            is_kept_by_bias &= added != float("-inf")
            added = scaled_bias(added)
        elif BIAS == ROW_BIAS:
            bias += bias_place + q_begin * bias_row
        kv_place = (batch * kv_batch + head // group * kv_head) * UNIT + k_begin * kv_row
        kv_offsets = cols.to(tl.int64) * kv_row
        k_tile = load_tile(
            k + kv_place, kv_offsets, is_kept_by_bias, head_dim, False, EVEN, BLOCK_D
        )
        q += (batch * q_batch + head * q_head) * UNIT
        lse_base = (batch * heads + head) * rows
        head_sink = 0.0
        if SINK:
            head_sink = tl.load(sink + head) * LOG2E
        TESTS_PAIRS: tl.constexpr = KIND == ROWS or BIAS == ROW_BIAS
        # Rows in this range keep every valid key.
        full_begin = tl.max(tl.where(is_kept_by_bias, first_row, 0), 0)
        full_end = tl.min(tl.where(is_kept_by_bias, past_row, q_count), 0)
        sums = tl.zeros([BLOCK_KEYS, BLOCK_ROWS], tl.float32)
        for row0 in range(
            begin // BLOCK_ROWS * BLOCK_ROWS + row_part * BLOCK_ROWS,
            end,
            row_parts * BLOCK_ROWS,
        ):
            tile_rows = row0 + tl.arange(0, BLOCK_ROWS)
            kept = is_kept_by_bias[:, None] & (tile_rows < q_count)[None, :]
            any_kept = True
            if KIND == ROWS:
                tile = list_tile(this_list, list_tiles, index, q_begin, row0, VARLEN)
                word_base = words + word_place(tile, row0) * keys
                word = tl.load(word_base + cols, mask=valid, other=0)
                bit = (tile_rows % WORD_ROWS).to(tl.int64)
                kept &= ((word[:, None] >> bit[None, :]) & 1) != 0
                any_kept = tl.max((word != 0).to(tl.int32), 0) != 0
            if any_kept:
                row_places = q_begin + tile_rows
                valid_rows = tile_rows < q_count
                shift = row_shifts(
                    lse, row_sums, lse_base + row_places, valid_rows, head_sink, SINK, SUMS
                )
                q_tile = load_tile(
                    q, row_places * (q_row * UNIT), valid_rows, head_dim, False, EVEN, BLOCK_D
                )
                products = dot(k_tile, tl.trans(q_tile))
                scores, _ = capped_scores(products, scale, softcap, SOFTCAP)
                if BIAS == KEY_BIAS:
                    scores += added[:, None]
                elif BIAS == ROW_BIAS:
                    places = tile_rows.to(tl.int64)[None, :] * bias_row
                    places += cols.to(tl.int64)[:, None] * bias_key
                    if KIND != ROWS:
                        kept &= kept_pairs(tile_rows, first_row, past_row)
                    row_added = tl.load(bias + places, mask=kept, other=float("-inf"))
                    row_added = row_added.to(tl.float32)
                    kept &= row_added != float("-inf")
                    scores += scaled_bias(row_added)
                weights = probabilities(scores, shift[None, :], BIAS)
                # Rows and keys of pairs that are not kept may be non-finite.
                if TESTS_PAIRS:
                    weights = tl.where(kept, weights, 0.0)
                elif (row0 < full_begin) | (row0 + BLOCK_ROWS > full_end):
                    weights = tl.where(kept_pairs(tile_rows, first_row, past_row), weights, 0.0)
                sums += weights
        sums = tl.where(is_kept_by_bias[:, None], sums, 0.0)
        place = (row_part * (batch_heads // heads) + index) * heads + head
        if VARLEN:
            place = row_part.to(tl.int64) * heads + head
        tl.store(mass + place * total_keys + k_begin + cols, tl.sum(sums, 1), mask=valid)
