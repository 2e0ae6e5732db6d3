// SPDX-License-Identifier: BSD-3-Clause
// The buffers of a thread for a tile, carved out of the caller's workspace.
//
// `static inline` for the reason given in ../indexing.h.
#pragma once

#include "kernels.h"

namespace fdm::cpu {

// Whether the tensor has a head for each query head although query heads share KV heads.
static inline bool is_per_query_head(const fdm_problem &p, const fdm_tensor &t) {
  return present(t) && t.shape[1] == p.heads && p.heads != p.kv_heads;
}
// Bias heads of a task: one for each head, or one that all heads share.
static inline int64_t bias_heads(const fdm_problem &p, int64_t heads) {
  return is_per_query_head(p, p.bias) ? heads : 1;
}
// The same for the sum of bias and index_bias.
static inline int64_t summed_bias_heads(const fdm_problem &p, int64_t heads) {
  return is_per_query_head(p, p.bias) || is_per_query_head(p, p.index_bias) ? heads : 1;
}
// The per-query bias or index_bias, or absent.
static inline const fdm_tensor &per_query_bias(const fdm_problem &p) {
  static const fdm_tensor absent{};
  if (has_key_lists(p)) return p.index_bias;
  return has_query_rows(p.bias) ? p.bias : absent;
}
static inline int64_t per_query_bias_heads(const fdm_problem &p, int64_t heads) {
  return is_per_query_head(p, per_query_bias(p)) ? heads : 1;
}
static inline int64_t bias_rows(const fdm_problem &p, int64_t rows) {
  return present(p.bias) && is_per_query(p.bias) ? rows : 1;
}
static inline int64_t heads_per_task(const fdm_problem &p) { return has_mask_per_query_head(p) ? 1 : group_size(p); }

// An upper bound of the multiply-adds of a forward pass with tiles of `tile_rows` rows: it counts every key as kept.
// Gathering and transposing a key counts as 20 multiply-adds per element.
static inline double forward_work(const fdm_problem &p, int64_t tile_rows) {
  const double tiles = double(has_key_lists(p) ? p.queries : ceil_div(p.queries, tile_rows));
  const double of_key = double(p.head_dim) * (2.0 * double(group_size(p) * p.queries) + 20.0 * tiles);
  return double(p.batch) * double(p.kv_heads) * double(max_columns(p)) * of_key;
}

// Floats of each matrix that the backward pass saves from its first pass over a tile.
constexpr int64_t kSavedFloats = int64_t(1) << 20;

struct TileBuffers {
  void *columns;
  float *q, *out;                       // heads x rows of D; out also serves as dq
  float *dout;                          // backward, as q
  float *row_max, *row_sum, *row_delta; // heads x rows; see Tile
  float *keys, *keys_t, *values, *values_t;
  float *dk, *dv;
  float *bias;
  double *references; // one for each bias head; see Tile
  double *dbias;
  float *scores, *dscores, *tanh;
  // One entry for each saved block of columns, and one that the unsaved blocks share; see Block.
  int32_t *index;
  uint8_t *dropped, *mixed;
  // Backward: row_sums and row_moments hold vectors of partial sums for each row; the saved matrices have heads x
  // rows for each saved block.
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
  const int64_t dim = padded_head_dim(p), heads = heads_per_task(p), rows = heads * max_tile_rows(p);
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
  b.bias = floats(summed_bias_heads(p, heads) * bias_rows(p, max_tile_rows(p)) * kBlockKeys);
  b.references = static_cast<double *>(take(bias_heads(p, heads) * int64_t(sizeof(double))));
  b.scores = floats(scores);
  if (backward) b.saved_blocks = clamp64(kSavedFloats / (rows * kBlockKeys), 1, ceil_div(max_columns(p), kBlockKeys));
  const int64_t slots = b.saved_blocks + 1;
  b.index = static_cast<int32_t *>(take(slots * kBlockKeys * int64_t(sizeof(int32_t))));
  b.dropped = static_cast<uint8_t *>(take(slots * summed_bias_heads(p, heads) * kBlockKeys));
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
