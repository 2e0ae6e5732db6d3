// SPDX-License-Identifier: BSD-3-Clause
// What a thread needs to work on a tile, carved out of the caller's workspace.
//
// `static inline` for the reason given in ../indexing.h.
#pragma once

#include "kernels.h"

namespace fdm::cpu {

// Whether each of the query heads that share a KV head has rows of a bias of its own.
static inline bool is_per_query_head(const fdm_problem &p, const fdm_tensor &t) {
  return present(t) && t.shape[1] == p.heads && p.heads != p.kv_heads;
}
// How many rows of bias a task holds: its own head's, or one that all heads share; one query's, or one for all.
static inline int64_t bias_heads(const fdm_problem &p, int64_t heads) {
  return is_per_query_head(p, p.bias) ? heads : 1;
}
// The same of what is added to scores: the bias and that of what is listed.
static inline int64_t added_heads(const fdm_problem &p, int64_t heads) {
  return is_per_query_head(p, p.bias) || is_per_query_head(p, p.index_bias) ? heads : 1;
}
// A bias per query, or absent.
static inline const fdm_tensor &row_bias(const fdm_problem &p) {
  static const fdm_tensor absent{};
  if (lists_keys(p)) return p.index_bias;
  return has_rows(p.bias) ? p.bias : absent;
}
static inline int64_t row_bias_heads(const fdm_problem &p, int64_t heads) {
  return is_per_query_head(p, row_bias(p)) ? heads : 1;
}
static inline int64_t bias_rows(const fdm_problem &p, int64_t rows) {
  return present(p.bias) && per_query(p.bias) ? rows : 1;
}
static inline int64_t heads_per_task(const fdm_problem &p) { return lists_per_query_head(p) ? 1 : group_size(p); }

// An upper bound of the multiply-adds of a forward pass with tiles of so many rows: it counts every key as kept.
// Gathering and transposing a key counts as 20 multiply-adds for each of its elements.
static inline double forward_work(const fdm_problem &p, int64_t tile_rows) {
  const double tiles = double(lists_keys(p) ? p.queries : ceil_div(p.queries, tile_rows));
  const double of_key = double(p.head_dim) * (2.0 * double(group_size(p) * p.queries) + 20.0 * tiles);
  return double(p.batch) * double(p.kv_heads) * double(most_columns(p)) * of_key;
}

// Floats of each matrix that the backward pass saves of its first look at a tile.
constexpr int64_t kSavedFloats = int64_t(1) << 20;

struct TileBuffers {
  void *columns;
  float *q, *out;                       // heads x rows of D; out also serves as dq
  float *dout;                          // backward, as q
  float *row_max, *row_sum, *row_delta; // heads x rows; see Tile
  float *keys, *keys_t, *values, *values_t;
  float *dk, *dv;
  float *bias;
  double *references; // for each head of the bias; see Tile
  double *dbias;
  float *scores, *dscores, *tanh;
  // There is one of these for each block of columns that is saved, and one for the others, of which one is current; see
  // Block.
  int32_t *index;
  uint8_t *dropped, *mixed;
  // The backward pass has vectors of partial sums for each row, and heads x rows for each block that is saved.
  float *row_sums, *row_moments;
  int64_t saved_blocks;
  float *saved_p, *saved_dp, *saved_tanh;
};

static inline TileBuffers carve_tile_buffers(const fdm_problem &p, bool backward, void *base, int64_t *bytes) {
  int64_t used = 0;
  const auto take = [&](int64_t size) {
    void *buffer = base ? static_cast<char *>(base) + used : nullptr;
    used += round_up(size, 64);
    return buffer;
  };
  const auto floats = [&](int64_t count) { return static_cast<float *>(take(count * int64_t(sizeof(float)))); };
  const int64_t dim = padded_head_dim(p), heads = heads_per_task(p), rows = heads * most_tile_rows(p);
  const int64_t block = kBlockKeys * dim, scores = kBlockRows * kBlockKeys;
  TileBuffers b{};
  b.columns = take(column_scratch_bytes(p));
  b.q = floats(rows * dim);
  b.out = floats(rows * dim);
  b.row_max = floats(rows);
  b.row_sum = floats(rows);
  b.keys = floats(block);
  b.keys_t = floats(block);
  b.values = floats(block);
  b.bias = floats(added_heads(p, heads) * bias_rows(p, most_tile_rows(p)) * kBlockKeys);
  b.references = static_cast<double *>(take(bias_heads(p, heads) * int64_t(sizeof(double))));
  b.scores = floats(scores);
  if (backward) b.saved_blocks = clamp64(kSavedFloats / (rows * kBlockKeys), 1, ceil_div(most_columns(p), kBlockKeys));
  const int64_t slots = b.saved_blocks + 1;
  b.index = static_cast<int32_t *>(take(slots * kBlockKeys * int64_t(sizeof(int32_t))));
  b.dropped = static_cast<uint8_t *>(take(slots * added_heads(p, heads) * kBlockKeys));
  b.mixed = static_cast<uint8_t *>(take(slots));
  if (backward) {
    b.dout = floats(rows * dim);
    b.row_delta = floats(rows);
    b.values_t = floats(block);
    b.dk = floats(block);
    b.dv = floats(block);
    b.dbias = static_cast<double *>(take(bias_heads(p, heads) * kBlockKeys * int64_t(sizeof(double))));
    b.dscores = floats(scores);
    b.tanh = floats(scores);
    b.row_sums = floats(rows * kMaxLanes);
    b.row_moments = floats(rows * kMaxLanes);
    const int64_t saved = b.saved_blocks * rows * kBlockKeys;
    b.saved_p = floats(saved);
    b.saved_dp = floats(saved);
    if (p.softcap > 0) b.saved_tanh = floats(saved);
  }
  *bytes = used;
  return b;
}

} // namespace fdm::cpu
