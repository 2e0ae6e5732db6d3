# SPDX-License-Identifier: BSD-3-Clause
"""The scores of a row block at some of its tile's columns, for the kernels over row blocks."""

import triton
import triton.language as tl

from .common import (
    KEY_BIAS,
    NO_BIAS,
    ROW_BIAS,
    ROWS,
    WORD_ROWS,
    capped_scores,
    dot,
    kept_intervals,
    key_offsets,
    load_tile,
    scaled_bias,
    tile_columns,
)


@triton.jit
def score_block(
    q_tile,
    tile_rows,
    at,
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
    PARTIAL: tl.constexpr,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
    CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PAGED: tl.constexpr,
    GUARD: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return keys and values; scores, slope and kept pairs as (row, column); and the columns.

    Scores are -inf where a pair is not kept. With GUARD, keys that the bias drops for all rows of
    the block are not loaded, because they may be non-finite.
    """
    cols = tile_columns(columns, at, full, count, keys, KIND, PARTIAL)
    valid = at < count
    kept = (tile_rows < q_count)[:, None] & valid[None, :]
    if PARTIAL:
        if KIND == ROWS:
            word = tl.load(words + cols, mask=valid, other=0)
            bit = (tile_rows % WORD_ROWS).to(tl.int64)
            kept = ((word[None, :] >> bit[:, None]) & 1) != 0
        else:
            first_row, past_row = kept_intervals(
                cols, valid, first, past, q_count, causal_offset, KIND, CAUSAL
            )
            kept = (first_row[None, :] <= tile_rows[:, None]) & (
                tile_rows[:, None] < past_row[None, :]
            )
    needed = valid
    if BIAS == KEY_BIAS:
        added = tl.load(bias + cols.to(tl.int64) * bias_key, mask=valid, other=0.0)
        if GUARD:
            needed &= added != float("-inf")
            kept &= needed[None, :]
        added = scaled_bias(added)[None, :]
    elif BIAS == ROW_BIAS:
        places = tile_rows.to(tl.int64)[:, None] * bias_row
        places += cols.to(tl.int64)[None, :] * bias_key
        added = tl.load(bias + places, mask=kept, other=float("-inf")).to(tl.float32)
        kept &= added != float("-inf")
        needed = tl.max(kept.to(tl.int32), 0) != 0
        added = scaled_bias(added)
    offsets = key_offsets(cols, valid, table, page, kv_page, kv_row, PAGED)
    ALL: tl.constexpr = not PARTIAL and not GUARD
    k_tile = load_tile(k, offsets, needed, head_dim, ALL, EVEN, BLOCK_D)
    v_tile = load_tile(v, offsets, needed, head_dim, ALL, EVEN, BLOCK_D)
    products = dot(q_tile, tl.trans(k_tile))
    scores, slope = capped_scores(products, scale, softcap, SOFTCAP)
    if BIAS != NO_BIAS:
        scores += added
    if not ALL:
        scores = tl.where(kept, scores, float("-inf"))
    return k_tile, v_tile, scores, slope, kept, cols
