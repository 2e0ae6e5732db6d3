// SPDX-License-Identifier: BSD-3-Clause
// The columns of a tile in the order of the attention kernels: from a plan, or computed (no mask, or a plan of runs).
#pragma once

#include "../plan/plan.cuh"

namespace fdm::cuda {

struct TileColumns {
  int32_t count, full;
  int32_t first_row; // the first row of the tile of kTileRows rows, in its sequence
  int32_t causal_off;
  int32_t first_key, first_full_key; // without column_keys: the first key, and the first full key
  const int32_t *column_keys;        // null: column_key() computes keys; if both runs start at 0, column c is key c
  // Entry column_keys_size - 1 is the first partial column, then backwards; 0: entry c is column c.
  int32_t column_keys_size;
  TileWords words;            // the words of all keys of the sequence, if there is a row plan
  const int32_t *start, *end; // the rows of each key; null: there are no intervals
  int64_t start_stride, end_stride;
  bool causal;
  int32_t walk_begin; // kernels walk blocks of columns from this one to the first; -1: from the first on
};

// The index among the tile's blocks of columns of block n of the walk.
__device__ __forceinline__ int column_block(const TileColumns &t, int n) {
  const int begin = t.walk_begin;
  return n <= begin ? begin - n : n;
}

// Some rows of a tile see the first `count` keys of a sequence. All rows see the first `full` keys.
struct TileSpan {
  int32_t count, full;
};

// The span of `rows` rows from `first` on, without a mask.
__device__ __forceinline__ TileSpan consecutive_columns(const fdm_problem &p, const Sequence &s, int64_t first,
                                                        int64_t rows) {
  const auto keys = static_cast<int32_t>(s.k_count);
  if (!is_causal(p)) return {keys, keys};
  const int64_t last = min64(s.q_count, first + rows) - 1;
  const int64_t full = max64(0, min64(keys, first + s.causal_off + 1));
  return {static_cast<int32_t>(max64(full, min64(keys, last + s.causal_off + 1))), static_cast<int32_t>(full)};
}

// Sets all of TileColumns except the fields of find_column_intervals(). Two threads may run both in parallel.
__device__ __forceinline__ void find_columns(TileColumns &t, const fdm_problem &p, const Plan &plan, const Sequence &s,
                                             int64_t sequence_index, int64_t head, int64_t tile) {
  const int64_t first = tile * kTileRows;
  t.first_row = static_cast<int32_t>(first);
  t.causal_off = static_cast<int32_t>(s.causal_off);
  t.causal = is_causal(p);
  t.walk_begin = -1;
  t.first_key = t.first_full_key = 0;
  t.column_keys = nullptr;
  t.column_keys_size = 0;
  t.words = {};
  const fdm_mask_kind kind = mask_kind(p);
  if (kind == FDM_MASK_NONE) {
    const TileSpan span = consecutive_columns(p, s, first, kTileRows);
    t.full = span.full;
    t.count = span.count;
    return;
  }
  const int64_t list = list_number(p, plan, s, head);
  const int64_t list_tile = list * plan.tiles + tile_number(p, s, sequence_index, tile);
  if (plan.runs) {
    const TileRun run = plan.runs[list_tile];
    t.count = run.count;
    t.full = run.full;
    t.first_key = run.first;
    t.first_full_key = run.full_first;
    return;
  }
  const TileCounts counts = plan.counts[list_tile];
  t.count = counts.columns;
  t.full = max(0, counts.full);
  if (plan.columns && !counts.overflows()) {
    t.column_keys = plan.columns + list_tile * plan.tile_keys;
    t.column_keys_size = plan.tile_keys;
  } else {
    t.column_keys = plan.kept_index + list * plan.list_keys + s.k_begin + (counts.overflows() ? ~counts.full : 0);
  }
  if (kind != FDM_MASK_ROWS) return;
  t.words = tile_words(plan, list_tile);
  if (!plan.places) return;
  const ColumnPlace place = plan.places[list_tile];
  t.column_keys = plan.columns + int64_t(place.first_granule) * kGranuleColumns;
  t.column_keys_size = place.room;
}

__device__ __forceinline__ void find_column_intervals(TileColumns &t, const fdm_problem &p, const Sequence &s,
                                                      int64_t head) {
  t.start = t.end = nullptr;
  t.start_stride = t.end_stride = 0;
  if (mask_kind(p) != FDM_MASK_INTERVALS) return;
  const auto base = [&](const fdm_tensor &x) {
    return static_cast<const int32_t *>(x.data) + batch_index(x, s) * x.stride[0] +
           head_index(p, x, head) * x.stride[1] + s.k_begin * x.stride[3];
  };
  t.start = base(p.start);
  t.end = base(p.end);
  t.start_stride = p.start.stride[3];
  t.end_stride = p.end.stride[3];
}

__device__ __forceinline__ TileColumns tile_columns(const fdm_problem &p, const Plan &plan, const Sequence &s,
                                                    int64_t sequence_index, int64_t head, int64_t tile) {
  TileColumns t;
  find_columns(t, p, plan, s, sequence_index, head, tile);
  find_column_intervals(t, p, s, head);
  return t;
}

// The address of the key of column c < count, if there are column_keys.
__device__ __forceinline__ const int32_t *column_key_address(const TileColumns &t, int32_t c) {
  return t.column_keys + (c < t.full || t.column_keys_size == 0 ? c : t.column_keys_size - 1 - (c - t.full));
}

// The key of column c < count, if there are no column_keys.
__device__ __forceinline__ int32_t key_of_run(const TileColumns &t, int32_t c) {
  if (c < t.full) return t.first_full_key + c;
  const int32_t key = t.first_key + c - t.full;
  return key < t.first_full_key ? key : key + t.full;
}

// The key of column c < count.
__device__ __forceinline__ int32_t column_key(const TileColumns &t, int32_t c) {
  return t.column_keys ? *column_key_address(t, c) : key_of_run(t, c);
}

// The rows of a tile that keep a column, one word for each 32 rows: from the key's rows [start, end) if there are
// intervals, else the word of the row plan.
__device__ __forceinline__ RowWord column_word(const TileColumns &t, int32_t c, int32_t key, int32_t start, int32_t end,
                                               const RowWord &planned) {
  RowWord word;
  if (c < t.full || c >= t.count) {
#pragma unroll
    for (int part = 0; part < kTileRows / 32; ++part) word.part[part] = c < t.full ? ~0u : 0u;
    return word;
  }
  if (t.words.words) return planned;
  int first = 0, past = kTileRows;
  if (t.start) {
    first = max(first, max(start, 0) - t.first_row);
    past = min(past, max(end, 0) - t.first_row);
  }
  if (t.causal) first = max(first, key - t.causal_off - t.first_row);
#pragma unroll
  for (int part = 0; part < kTileRows / 32; ++part) {
    const int low = max(0, first - 32 * part), high = min(32, past - 32 * part);
    word.part[part] = low < high ? (~0u >> (32 - (high - low))) << low : 0u;
  }
  return word;
}

} // namespace fdm::cuda
