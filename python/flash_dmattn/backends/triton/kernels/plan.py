# SPDX-License-Identifier: BSD-3-Clause
"""Kernels that make plans. Each reads its mask once.

A program processes the keys of one list and sequence (or of one tile of it) in order, with a
running count. So lists are in key order, and equal masks give equal plans.
"""

import triton
import triton.language as tl

from .common import LIST_ROWS, SIZES, WORD_ROWS, list_tile, sequence_place


@triton.jit(do_not_specialize=SIZES)
def compact_kernel(
    start,
    end,
    mask,
    first,
    past,
    kept,
    kept_count,
    cu_q,
    cu_k,
    rows,
    queries,
    total_keys,
    keys,
    list_keys,
    sequences,
    CAUSAL: tl.constexpr,
    VARLEN: tl.constexpr,
    INTERVALS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Write the keys of a list that any query keeps, and the rows that keep each key.

    The mask is given as intervals, or as one boolean per key.
    """
    index = tl.program_id(0) % sequences
    this_list = (tl.program_id(0) // sequences).to(tl.int64)
    _, _, q_count, k_begin, k_count = sequence_place(
        index, cu_q, cu_k, rows, queries, total_keys, keys, VARLEN
    )
    base = this_list * list_keys + k_begin
    causal_offset = k_count - q_count
    found = 0
    for key0 in range(0, k_count, BLOCK_KEYS):
        cols = key0 + tl.arange(0, BLOCK_KEYS)
        valid = cols < k_count
        if INTERVALS:
            first_row = tl.maximum(tl.load(start + base + cols, mask=valid, other=0), 0)
            past_row = tl.minimum(tl.load(end + base + cols, mask=valid, other=0), q_count)
        else:
            kept_key = tl.load(mask + base + cols, mask=valid, other=0) != 0
            first_row = tl.zeros([BLOCK_KEYS], tl.int32)
            past_row = tl.where(kept_key, q_count, 0)
        if CAUSAL:
            first_row = tl.maximum(first_row, cols - causal_offset)
        tl.store(first + base + cols, first_row, mask=valid)
        tl.store(past + base + cols, past_row, mask=valid)
        is_kept = valid & (first_row < past_row)
        place = found + tl.cumsum(is_kept.to(tl.int32), 0) - 1
        tl.store(kept + base + place, cols, mask=is_kept)
        found += tl.sum(is_kept.to(tl.int32), 0)
    tl.store(kept_count + tl.program_id(0), found)


@triton.jit
def tile_of_program(lists, sequences):
    """Return list_sequence, list, sequence and first row of this program's tile."""
    list_sequence = tl.program_id(0) % (lists * sequences)
    index = list_sequence % sequences
    this_list = (list_sequence // sequences).to(tl.int64)
    row0 = tl.program_id(0) // (lists * sequences) * LIST_ROWS
    return list_sequence, this_list, index, row0


@triton.jit
def store_counts(counts, tile, full_count, partial_count):
    """Store a tile's number of columns, and how many of them are full."""
    tl.store(counts + 2 * tile, full_count + partial_count)
    tl.store(counts + 2 * tile + 1, full_count)


@triton.jit
def append_columns(columns, keys, cols, full, partial, full_count, partial_count):
    """Append columns to the list of a tile: full ones from the front, partial from the back."""
    full_place = full_count + tl.cumsum(full.to(tl.int32), 0) - 1
    partial_place = partial_count + tl.cumsum(partial.to(tl.int32), 0) - 1
    tl.store(columns + full_place, cols, mask=full)
    tl.store(columns + keys - 1 - partial_place, cols, mask=partial)
    full_count += tl.sum(full.to(tl.int32), 0)
    partial_count += tl.sum(partial.to(tl.int32), 0)
    return full_count, partial_count


@triton.jit(do_not_specialize=SIZES)
def list_intervals_kernel(
    first,
    past,
    kept,
    kept_count,
    counts,
    columns,
    cu_q,
    cu_k,
    rows,
    queries,
    total_keys,
    keys,
    list_keys,
    list_tiles,
    sequences,
    lists,
    VARLEN: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Write the columns of one tile, from the keys that any query keeps."""
    list_sequence, this_list, index, row0 = tile_of_program(lists, sequences)
    _, q_begin, q_count, k_begin, _ = sequence_place(
        index, cu_q, cu_k, rows, queries, total_keys, keys, VARLEN
    )
    if row0 < q_count:
        row_end = tl.minimum(row0 + LIST_ROWS, q_count)
        base = this_list * list_keys + k_begin
        tile = list_tile(this_list, list_tiles, index, q_begin, row0, VARLEN)
        columns += tile * keys
        kept_keys = tl.load(kept_count + list_sequence)
        full_count, partial_count = 0, 0
        for at0 in range(0, kept_keys, BLOCK_KEYS):
            at = at0 + tl.arange(0, BLOCK_KEYS)
            valid = at < kept_keys
            cols = tl.load(kept + base + at, mask=valid, other=0)
            first_row = tl.load(first + base + cols, mask=valid, other=0)
            past_row = tl.load(past + base + cols, mask=valid, other=0)
            full = valid & (first_row <= row0) & (past_row >= row_end)
            seen = tl.maximum(first_row, row0) < tl.minimum(past_row, row_end)
            full_count, partial_count = append_columns(
                columns, keys, cols, full, valid & seen & ~full, full_count, partial_count
            )
        store_counts(counts, tile, full_count, partial_count)


@triton.jit(do_not_specialize=SIZES)
def list_rows_kernel(
    mask,
    words,
    counts,
    columns,
    cu_q,
    cu_k,
    rows,
    queries,
    total_keys,
    keys,
    mask_batch,
    mask_head,
    mask_row,
    mask_key,
    list_heads,
    list_tiles,
    sequences,
    lists,
    CAUSAL: tl.constexpr,
    VARLEN: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Convert a mask's rows in one tile to columns, and to words of WORD_ROWS bits per key."""
    _, this_list, index, row0 = tile_of_program(lists, sequences)
    _, q_begin, q_count, _, k_count = sequence_place(
        index, cu_q, cu_k, rows, queries, total_keys, keys, VARLEN
    )
    if row0 < q_count:
        tile = list_tile(this_list, list_tiles, index, q_begin, row0, VARLEN)
        columns += tile * keys
        words += tile * (LIST_ROWS // WORD_ROWS) * keys
        mask += this_list // list_heads * mask_batch + this_list % list_heads * mask_head
        full_count, partial_count = 0, 0
        for key0 in range(0, k_count, BLOCK_KEYS):
            cols = key0 + tl.arange(0, BLOCK_KEYS)
            valid = cols < k_count
            full, seen = valid, cols < 0
            for part in tl.static_range(LIST_ROWS // WORD_ROWS):
                bits = tl.arange(0, WORD_ROWS)
                tile_rows = row0 + part * WORD_ROWS + bits
                exists = (tile_rows < q_count)[:, None] & valid[None, :]
                offsets = (q_begin + tile_rows)[:, None] * mask_row + cols.to(tl.int64)[
                    None, :
                ] * mask_key
                is_kept = tl.load(mask + offsets, mask=exists, other=0) != 0
                if CAUSAL:
                    is_kept &= cols[None, :] <= tile_rows[:, None] + (k_count - q_count)
                # The bits are disjoint, so their sum is their union.
                word = tl.sum(is_kept.to(tl.int64) << bits[:, None].to(tl.int64), 0)
                tl.store(words + part * keys + cols, word, mask=valid)
                full &= tl.sum((exists & ~is_kept).to(tl.int32), 0) == 0
                seen |= word != 0
            full_count, partial_count = append_columns(
                columns, keys, cols, full, seen & ~full, full_count, partial_count
            )
        store_counts(counts, tile, full_count, partial_count)
