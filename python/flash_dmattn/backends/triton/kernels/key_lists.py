# SPDX-License-Identifier: BSD-3-Clause
"""Attention over listed keys: each program computes one row of query heads that share a list.

These heads are the rows of its tiles; the keys of a tile are gathered once for all of them. Row
numbers run through all sequences. `..key_lists` documents sizes and strides.
"""

import triton
import triton.language as tl

from .common import (
    LN2,
    LOG2E,
    capped_scores,
    dot,
    forward_shift,
    load_tile,
    probabilities,
    rest_of,
    row_shifts,
    scaled_bias,
    store_tile,
)

# Triton would recompile a kernel for each of these that is 1 or a multiple of 16.
LIST_SIZES = [
    *("heads", "kv_heads", "group", "heads_at_once", "head_blocks", "rows", "length", "head_dim"),
    *("list_share", "index_share", "bias_share", "bias_head", "bias_key", "page", "page_batch"),
    *("mass_batch", "mass_head"),
]


@triton.jit
def tile_heads(kv_heads, group, heads_at_once, head_blocks, BLOCK_HEADS: tl.constexpr):
    """Return a program's row, KV head and query heads, and which of the heads are valid."""
    part = tl.program_id(0) % (kv_heads * head_blocks)
    row = (tl.program_id(0) // (kv_heads * head_blocks)).to(tl.int64)
    kv_head = (part // head_blocks).to(tl.int64)
    number = tl.arange(0, BLOCK_HEADS)
    within = part % head_blocks * heads_at_once + number
    return row, kv_head, kv_head * group + within, (number < heads_at_once) & (within < group)


@triton.jit
def listed_block(
    q_tile,
    at,
    row,
    kv_head,
    q_heads,
    valid_heads,
    k,
    v,
    indices,
    limit,
    begin,
    table,
    bias,
    index_bias,
    kv_heads,
    rows,
    length,
    head_dim,
    index_share,
    bias_share,
    bias_head,
    bias_key,
    page,
    scale,
    softcap,
    BIAS: tl.constexpr,
    INDEX_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PAGED: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return keys and values; scores, slope and kept pairs as (head, key); and for each key its
    index, its offset and whether a head needs it.

    Keys that no head of the tile keeps are not loaded, because they may be non-finite.
    """
    index = tl.load(indices + at, mask=at < length, other=-1)
    is_needed = (index >= 0) & (index < limit)
    index = tl.where(is_needed, index, 0)
    if PAGED:
        number = tl.load(table + index // page, mask=is_needed, other=0).to(tl.int64)
        place = number * page + index % page
    else:
        place = begin + index
    kept = valid_heads[:, None] & is_needed[None, :]
    if BIAS or INDEX_BIAS:
        added = tl.zeros(kept.shape, tl.float32)
        if BIAS:
            bias_at = q_heads[:, None] // bias_share * bias_head
            bias_at += index.to(tl.int64)[None, :] * bias_key
            added += tl.load(bias + bias_at, mask=kept, other=0.0)
        if INDEX_BIAS:
            index_at = (q_heads[:, None] // index_share * rows + row) * length + at[None, :]
            added += tl.load(index_bias + index_at, mask=kept, other=0.0).to(tl.float32)
        kept &= added != float("-inf")
        is_needed = tl.max(kept.to(tl.int32), 0) != 0
    offsets = (place * kv_heads + kv_head) * head_dim
    k_tile = load_tile(k, offsets, is_needed, head_dim, False, EVEN, BLOCK_D)
    v_tile = load_tile(v, offsets, is_needed, head_dim, False, EVEN, BLOCK_D)
    scores, slope = capped_scores(dot(q_tile, tl.trans(k_tile)), scale, softcap, SOFTCAP)
    if BIAS or INDEX_BIAS:
        scores += scaled_bias(added)
    scores = tl.where(kept, scores, float("-inf"))
    return k_tile, v_tile, scores, slope, kept, index, offsets, is_needed


@triton.jit(do_not_specialize=LIST_SIZES)
def list_forward_kernel(
    q,
    k,
    v,
    indices,
    limits,
    begins,
    sequences,
    table,
    bias,
    bias_firsts,
    index_bias,
    sink,
    out,
    out_rest,
    lse,
    heads,
    kv_heads,
    group,
    heads_at_once,
    head_blocks,
    rows,
    length,
    head_dim,
    list_share,
    index_share,
    bias_share,
    bias_head,
    bias_key,
    page,
    page_batch,
    scale,
    softcap,
    BIAS: tl.constexpr,
    INDEX_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PAGED: tl.constexpr,
    SINK: tl.constexpr,
    HAS_REST: tl.constexpr,
    UNIT: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Write out, with HAS_REST its residual, and lse of some heads of a row."""
    head_dim *= UNIT
    row, kv_head, q_heads, valid_heads = tile_heads(
        kv_heads, group, heads_at_once, head_blocks, BLOCK_ROWS
    )
    q_offsets = (row * heads + q_heads) * head_dim
    q_tile = load_tile(q, q_offsets, valid_heads, head_dim, False, EVEN, BLOCK_D)
    indices += (kv_head // list_share * rows + row) * length
    limit = tl.load(limits + row)
    begin = tl.load(begins + row)
    if PAGED:
        table += tl.load(sequences + row) * page_batch
    if BIAS:
        bias += tl.load(bias_firsts + row)
    row_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    out_tile = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    for at0 in range(0, length, BLOCK_KEYS):
        _, v_tile, scores, _, _, _, _, _ = listed_block(
            q_tile,
            at0 + tl.arange(0, BLOCK_KEYS),
            row,
            kv_head,
            q_heads,
            valid_heads,
            k,
            v,
            indices,
            limit,
            begin,
            table,
            bias,
            index_bias,
            kv_heads,
            rows,
            length,
            head_dim,
            index_share,
            bias_share,
            bias_head,
            bias_key,
            page,
            scale,
            softcap,
            BIAS,
            INDEX_BIAS,
            SOFTCAP,
            PAGED,
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
    tl.store(lse + row * heads + q_heads, (row_max + tl.log2(row_sum)) * LN2, mask=valid_heads)
    empty = row_sum == 0
    if SINK:  # lse excludes the sink
        row_sum += tl.exp2(tl.load(sink + q_heads, mask=valid_heads, other=0.0) * LOG2E - row_max)
    out_tile = tl.where(empty[:, None], 0.0, out_tile / row_sum[:, None])
    store_tile(out, q_offsets, out_tile, valid_heads, head_dim, BLOCK_D)
    if HAS_REST:
        rounded = out_tile.to(out.dtype.element_ty).to(tl.float32)
        rests = rest_of(out_tile, rounded, out.dtype.element_ty == tl.float16)
        store_tile(out_rest, q_offsets, rests, valid_heads, head_dim, BLOCK_D)


@triton.jit(do_not_specialize=LIST_SIZES)
def list_backward_kernel(
    q,
    k,
    v,
    indices,
    limits,
    begins,
    sequences,
    table,
    bias,
    bias_firsts,
    index_bias,
    dout,
    lse,
    share,
    shift,
    dq,
    dk,
    dv,
    dbias,
    dindex_bias,
    heads,
    kv_heads,
    group,
    heads_at_once,
    head_blocks,
    rows,
    length,
    head_dim,
    list_share,
    index_share,
    bias_share,
    bias_head,
    bias_key,
    page,
    page_batch,
    scale,
    softcap,
    BIAS: tl.constexpr,
    INDEX_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PAGED: tl.constexpr,
    UNIT: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    WANT_DK: tl.constexpr,
    WANT_DV: tl.constexpr,
    WANT_DBIAS: tl.constexpr,
    WANT_DINDEX: tl.constexpr,
    BIAS_BY_HEAD: tl.constexpr,
    INDEX_BY_HEAD: tl.constexpr,
):
    """Write dq of some heads of a row, and add to the gradients of the listed keys.

    For each row and head, ``share`` is the keys' share of the softmax, and ``shift`` is the
    gradient of lse minus ``share * sum(dout * out)``.
    """
    head_dim *= UNIT
    row, kv_head, q_heads, valid_heads = tile_heads(
        kv_heads, group, heads_at_once, head_blocks, BLOCK_ROWS
    )
    at_heads = row * heads + q_heads
    row_lse = tl.load(lse + at_heads, mask=valid_heads, other=float("-inf"))
    # Queries and gradients of rows without keys may be non-finite; they must not affect results.
    live = row_lse != float("-inf")
    row_lse = tl.where(live, row_lse * LOG2E, 0.0)
    row_share = tl.load(share + at_heads, mask=live, other=0.0)
    row_shift = tl.load(shift + at_heads, mask=live, other=0.0)
    q_offsets = at_heads * head_dim
    q_tile = load_tile(q, q_offsets, live, head_dim, False, EVEN, BLOCK_D)
    dout_tile = load_tile(dout, q_offsets, live, head_dim, False, EVEN, BLOCK_D)
    indices += (kv_head // list_share * rows + row) * length
    limit = tl.load(limits + row)
    begin = tl.load(begins + row)
    if PAGED:
        table += tl.load(sequences + row) * page_batch
    if BIAS:
        bias_first = tl.load(bias_firsts + row)
        bias += bias_first
        dbias += bias_first
    dq_tile = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    d = tl.arange(0, BLOCK_D)[None, :]
    for at0 in range(0, length, BLOCK_KEYS):
        at = at0 + tl.arange(0, BLOCK_KEYS)
        k_tile, v_tile, scores, slope, kept, index, offsets, is_needed = listed_block(
            q_tile,
            at,
            row,
            kv_head,
            q_heads,
            valid_heads,
            k,
            v,
            indices,
            limit,
            begin,
            table,
            bias,
            index_bias,
            kv_heads,
            rows,
            length,
            head_dim,
            index_share,
            bias_share,
            bias_head,
            bias_key,
            page,
            scale,
            softcap,
            BIAS,
            INDEX_BIAS,
            SOFTCAP,
            PAGED,
            EVEN,
            BLOCK_D,
        )
        weights = probabilities(scores, row_lse[:, None], BIAS or INDEX_BIAS)
        to_add = is_needed[:, None] & (d < head_dim)
        places = offsets[:, None] + d
        if WANT_DV:
            shares = (weights * row_share[:, None]).to(dout_tile.dtype)
            tl.atomic_add(dv + places, dot(tl.trans(shares), dout_tile), mask=to_add)
        dweights = dot(dout_tile, tl.trans(v_tile))
        dscores = weights * (row_share[:, None] * dweights + row_shift[:, None])
        dscores = tl.where(kept, dscores, 0.0)
        if WANT_DBIAS:
            key_at = index.to(tl.int64) * bias_key
            if BIAS_BY_HEAD:
                bias_at = q_heads[:, None] // bias_share * bias_head + key_at[None, :]
                tl.atomic_add(dbias + bias_at, dscores, mask=kept)
            else:
                head_at = kv_head * group // bias_share * bias_head
                tl.atomic_add(dbias + head_at + key_at, tl.sum(dscores, 0), mask=is_needed)
        if WANT_DINDEX:
            if INDEX_BY_HEAD:
                index_at = (q_heads[:, None] // index_share * rows + row) * length + at[None, :]
                tl.store(dindex_bias + index_at, dscores, mask=kept)
            else:
                index_at = (kv_head * group // index_share * rows + row) * length + at
                tl.atomic_add(dindex_bias + index_at, tl.sum(dscores, 0), mask=is_needed)
        dscores = (dscores * slope).to(k_tile.dtype)
        dq_tile += dot(dscores, k_tile)
        if WANT_DK:
            tl.atomic_add(dk + places, dot(tl.trans(dscores), q_tile) * scale, mask=to_add)
    store_tile(dq, q_offsets, dq_tile * scale, valid_heads, head_dim, BLOCK_D)


@triton.jit(do_not_specialize=LIST_SIZES)
def list_mass_kernel(
    q,
    k,
    v,
    indices,
    limits,
    begins,
    sequences,
    bias,
    bias_firsts,
    index_bias,
    sink,
    lse,
    mass,
    heads,
    kv_heads,
    group,
    heads_at_once,
    head_blocks,
    rows,
    length,
    head_dim,
    list_share,
    index_share,
    bias_share,
    bias_head,
    bias_key,
    mass_batch,
    mass_head,
    scale,
    softcap,
    BIAS: tl.constexpr,
    INDEX_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PACKED: tl.constexpr,
    SINK: tl.constexpr,
    UNIT: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Add the probabilities of some heads of a row to the sums of the listed keys."""
    head_dim *= UNIT
    row, kv_head, q_heads, valid_heads = tile_heads(
        kv_heads, group, heads_at_once, head_blocks, BLOCK_ROWS
    )
    at_heads = row * heads + q_heads
    head_sink = tl.zeros([BLOCK_ROWS], tl.float32)
    if SINK:
        head_sink = tl.load(sink + q_heads, mask=valid_heads, other=0.0) * LOG2E
    shift = row_shifts(lse, lse, at_heads, valid_heads, head_sink, SINK, False)
    live = shift != float("inf")
    q_tile = load_tile(q, at_heads * head_dim, live, head_dim, False, EVEN, BLOCK_D)
    indices += (kv_head // list_share * rows + row) * length
    limit = tl.load(limits + row)
    begin = tl.load(begins + row)
    if BIAS:
        bias += tl.load(bias_firsts + row)
    # The keys of packed sequences are numbered through all sequences.
    mass += begin if PACKED else tl.load(sequences + row) * mass_batch
    for at0 in range(0, length, BLOCK_KEYS):
        _, _, scores, _, kept, index, _, _ = listed_block(
            q_tile,
            at0 + tl.arange(0, BLOCK_KEYS),
            row,
            kv_head,
            q_heads,
            valid_heads,
            k,
            v,
            indices,
            limit,
            begin,
            indices,
            bias,
            index_bias,
            kv_heads,
            rows,
            length,
            head_dim,
            index_share,
            bias_share,
            bias_head,
            bias_key,
            1,
            scale,
            softcap,
            BIAS,
            INDEX_BIAS,
            SOFTCAP,
            False,
            EVEN,
            BLOCK_D,
        )
        weights = probabilities(scores, shift[:, None], BIAS or INDEX_BIAS)
        places = q_heads[:, None] * mass_head + index.to(tl.int64)[None, :]
        tl.atomic_add(mass + places, weights, mask=kept & live[:, None])
