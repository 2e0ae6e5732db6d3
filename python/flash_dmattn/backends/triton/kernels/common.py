# SPDX-License-Identifier: BSD-3-Clause
"""Helpers of the attention kernels: memory offsets, columns of a tile, and scores.

Sizes and strides have the same names in all kernels; `..problem` documents them. Row and key
numbers start at the first of their sequence. Elementwise functions broadcast, so they serve scores
of (rows, keys) and of (keys, rows).
"""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

# Kinds of masks. A plan includes the causal limit; without a plan the kernels compute it.
RANGE = tl.constexpr(0)  # no mask, so no plan
INTERVALS = tl.constexpr(1)  # each key has a first and a past-the-last row
ROWS = tl.constexpr(2)  # each key has a word of bits for every WORD_ROWS rows

NO_BIAS = tl.constexpr(0)
KEY_BIAS = tl.constexpr(1)  # the same for every row
ROW_BIAS = tl.constexpr(2)

LIST_ROWS = tl.constexpr(128)  # rows of a tile that share one list of columns
WORD_ROWS = tl.constexpr(64)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32
# Lower bound of a finite bias times LOG2E, which could otherwise become -inf, "not kept".
LOWEST = tl.constexpr(-3.4e38)

# These differ from call to call. Triton would recompile a kernel for each that is 1 or a multiple
# of 16. UNIT gives the alignment that matters.
SIZES = [
    *("heads", "kv_heads", "group", "batch_heads", "sequences", "rows", "queries", "total"),
    *("total_keys", "keys", "head_dim", "q_batch", "q_row", "q_head", "kv_batch", "kv_row"),
    *(
        "kv_head",
        "kv_page",
        "page",
        "page_batch",
        "mask_batch",
        "mask_head",
        "mask_row",
        "mask_key",
    ),
    *("bias_batch", "bias_head", "bias_row", "bias_key", "bias_share"),
    *("dbias_batch", "dbias_head", "dbias_row", "share_batches", "share_heads"),
    *("lists", "list_batch", "list_heads", "list_share", "list_keys", "list_tiles"),
    *("programs", "row_parts", "part_heads"),
]


@triton.jit
def sequence_place(index, cu_q, cu_k, rows, queries, total_keys, keys, VARLEN: tl.constexpr):
    """Return batch, q_begin, q_count, k_begin and k_count of a sequence.

    Packed sequences are all in batch 0. Checking the cu_seqlens would synchronize with the device,
    so any values are clamped to the bounds of the tensors.
    """
    batch = index.to(tl.int64)
    q_begin, k_begin = batch * 0, batch * 0
    q_count, k_count = (batch * 0 + rows).to(tl.int32), (batch * 0 + keys).to(tl.int32)
    if VARLEN:
        q_begin = tl.minimum(tl.maximum(tl.load(cu_q + index).to(tl.int64), 0), rows)
        k_begin = tl.minimum(tl.maximum(tl.load(cu_k + index).to(tl.int64), 0), total_keys)
        q_end = tl.minimum(tl.load(cu_q + index + 1).to(tl.int64), rows)
        k_end = tl.minimum(tl.load(cu_k + index + 1).to(tl.int64), total_keys)
        q_count = tl.maximum(tl.minimum(q_end - q_begin, queries), 0).to(tl.int32)
        k_count = tl.maximum(tl.minimum(k_end - k_begin, keys), 0).to(tl.int32)
        batch = batch * 0
    return batch, q_begin, q_count, k_begin, k_count


@triton.jit
def list_tile(this_list, list_tiles, index, q_begin, row, VARLEN: tl.constexpr):
    """Return the index of a row's tile among the tiles of all lists; sequences never share one."""
    tile = this_list * list_tiles + row // LIST_ROWS
    if VARLEN:
        tile += q_begin // LIST_ROWS + index
    return tile


@triton.jit
def word_place(tile, row):
    """Return the index of the words of a block of rows."""
    row += tile * 0  # makes a tensor of a loop variable, a plain integer in the interpreter
    return tile * (LIST_ROWS // WORD_ROWS) + row % LIST_ROWS // WORD_ROWS


@triton.jit
def tile_counts(
    counts,
    tile,
    row0,
    block_rows,
    q_count,
    k_count,
    block_keys,
    KIND: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Return a tile's number of columns, the number of leading ones that all its rows keep, and
    that number rounded down to whole blocks.
    """
    if KIND == RANGE:
        count, full = k_count, k_count
        if CAUSAL:
            seen = k_count - q_count + row0 + 1
            full = tl.maximum(tl.minimum(seen, k_count), 0)
            count = tl.maximum(tl.minimum(seen + block_rows - 1, k_count), 0)
    else:
        count = tl.load(counts + 2 * tile)
        full = tl.load(counts + 2 * tile + 1)
    return count, full, full // block_keys * block_keys


@triton.jit
def tile_columns(columns, at, full, count, keys, KIND: tl.constexpr, PARTIAL: tl.constexpr):
    """Return the keys at places `at` of a tile; partial ones lie reversed at the end."""
    if KIND == RANGE:
        cols = at
    elif PARTIAL:
        place = tl.where(at < full, at, keys - 1 - (at - full))
        cols = tl.load(columns + place, mask=at < count, other=0)
    else:
        cols = tl.load(columns + at)
    return cols


@triton.jit
def key_offsets(cols, valid, table, page, kv_page, kv_row, PAGED: tl.constexpr):
    """Return the offsets of keys from the first of their sequence; paged: from the first page."""
    if PAGED:
        number = tl.load(table + cols // page, mask=valid, other=0).to(tl.int64)
        offsets = number * kv_page + (cols % page).to(tl.int64) * kv_row
    else:
        offsets = cols.to(tl.int64) * kv_row
    return offsets


@triton.jit
def kept_intervals(
    cols, valid, first, past, q_count, causal_offset, KIND: tl.constexpr, CAUSAL: tl.constexpr
):
    """Return the first row of each key and its end; without a mask, by the causal limit."""
    if KIND == RANGE:
        first_row = cols * 0
        if CAUSAL:
            first_row = tl.maximum(cols - causal_offset, 0)
        past_row = tl.where(valid, q_count, 0)
    else:
        first_row = tl.load(first + cols, mask=valid, other=0)
        past_row = tl.load(past + cols, mask=valid, other=0)
    return first_row, past_row


@triton.jit
def scaled_bias(bias):
    """Return a bias in units of ln 2. Only -inf becomes -inf."""
    lowest = tl.where(bias == float("-inf"), bias, LOWEST)
    return tl.maximum(bias * LOG2E, lowest, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def capped_scores(products, scale, softcap, SOFTCAP: tl.constexpr):
    """Return scores in units of ln 2, for exp2, and their derivative by the uncapped scores."""
    if SOFTCAP:
        tanh = 1 - 2 / (tl.exp(products * (2 * scale / softcap)) + 1)
        scores, slope = tanh * (softcap * LOG2E), 1 - tanh * tanh
    else:
        scores, slope = products * (scale * LOG2E), 1.0
    return scores, slope


@triton.jit
def probabilities(scores, lse, BIAS: tl.constexpr):
    """Return the probabilities of scores, both in units of ln 2."""
    exponent = scores - lse
    if BIAS != NO_BIAS:
        # Only rounding makes it positive; the error grows with the magnitude of biases.
        exponent = tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.exp2(exponent)


@triton.jit
def forward_shift(row_max):
    """Return what the forward pass subtracts from the scores of rows with this largest score."""
    # -inf - -inf, of a row that has seen no key, would be NaN. inf - inf, too, but the logarithm of
    # a row's sum must be NaN only if a score is.
    return tl.where(row_max == float("-inf"), 0.0, tl.minimum(row_max, LARGEST))


@triton.jit
def row_shifts(lse, sums, places, valid, head_sink, SINK: tl.constexpr, SUMS: tl.constexpr):
    """Return log2 of the divisor of each row's exponentials; +inf for rows without keys.

    With SUMS, ``lse`` holds the largest score in base-2 units instead of the logarithm of the sum.
    ``head_sink`` is in base-2 units, too.
    """
    shift = tl.load(lse + places, mask=valid, other=float("-inf"))
    if SUMS:
        shift += tl.log2(tl.load(sums + places, mask=valid, other=1.0))
    else:
        shift *= LOG2E
    empty = shift == float("-inf")
    if SINK:
        # The larger of both, plus the log2 of one plus the ratio of the smaller to it.
        least, most = tl.minimum(shift, head_sink), tl.maximum(shift, head_sink)
        shift = most + tl.log2(1 + tl.exp2(tl.where(least == most, 0.0, least - most)))
    return tl.where(empty, float("inf"), shift)


@triton.jit
def dot(a, b):
    """Multiply matrices of the inputs' dtype: products are exact, sums are float32."""
    if INTERPRETED:
        # tl.dot would multiply the integers that store bfloat16 here. float64 also makes a product
        # equal that of the transposes, whose float32 sums a CPU may order differently.
        product = tl.dot(a.to(tl.float64), b.to(tl.float64)).to(tl.float32)
    else:
        product = tl.dot(a, b, input_precision="ieee")
    return product


@triton.jit
def load_tile(
    base, offsets, valid, head_dim, ALL: tl.constexpr, EVEN: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load vectors of head_dim elements, 0 where not valid; ALL means that all are valid."""
    d = tl.arange(0, BLOCK_D)
    at = base + offsets[:, None] + d[None, :]
    if EVEN and ALL:
        tile = tl.load(at)
    elif EVEN:
        tile = tl.load(at, mask=valid[:, None], other=0.0)
    else:
        tile = tl.load(at, mask=valid[:, None] & (d < head_dim)[None, :], other=0.0)
    return tile


@triton.jit
def rest_of(tile, rounded, HALF: tl.constexpr):
    """Return the int8 rounding residual of float32 numbers: see `with_rest`."""
    SHIFT: tl.constexpr = 5 if HALF else 9
    rest = tile.to(tl.int32, bitcast=True) - rounded.to(tl.int32, bitcast=True)
    rest = (rest + (1 << (SHIFT - 1))) >> SHIFT
    return tl.minimum(tl.maximum(rest, -128), 127).to(tl.int8)


@triton.jit
def with_rest(rounded, rest, HALF: tl.constexpr):
    """Return float32 numbers from 16-bit ones and the residual, the difference of their bits.

    Its unit is 2^-8 of the range of differences: one ulp of float16, two ulps of bfloat16, which
    the interpreter truncates.
    """
    SHIFT: tl.constexpr = 5 if HALF else 9
    bits = rounded.to(tl.float32).to(tl.int32, bitcast=True)
    return (bits + (rest.to(tl.int32) << SHIFT)).to(tl.float32, bitcast=True)


@triton.jit
def store_tile(base, offsets, tile, valid, head_dim, BLOCK_D: tl.constexpr):
    """Store vectors of head_dim elements."""
    d = tl.arange(0, BLOCK_D)
    mask = valid[:, None] & (d < head_dim)[None, :]
    tl.store(base + offsets[:, None] + d[None, :], tile.to(base.dtype.element_ty), mask=mask)
