// SPDX-License-Identifier: BSD-3-Clause
// Backward pass of one tile: dQ of its rows, and its contributions to dK, dV and dbias of its columns.
//
// With dP = dO V', delta_i = sum_j P_ij dP_ij - dlse_i / sum_j P_ij and dS = P (dP - delta), dV = P' dO, dbias = dS,
// and dQ = dS' K, dK = dS'' Q with dS' = scale dS (1 - tanh^2). The P of a row sum to 1 unless it has a sink.
#pragma once

#include "two_pass.h"

namespace fdm::cpu::FDM_SIMD_NAMESPACE {
namespace {

// Sums dS over the rows that share a bias: in float32 within a tile, in four partial sums, and in float64 over tiles.
void add_per_key_dbias(const Tile &tile, int64_t head, int64_t heads) {
  constexpr int64_t kSums = 4;
  const int64_t rows = tile.task.rows;
  for (int64_t g = 0; g < heads; ++g) {
    double *total = tile.buffers.dbias + (bias_heads(tile.p, tile.task.heads) > 1 ? head + g : 0) * kBlockKeys;
    const float *ds = tile.buffers.dscores + g * rows * kBlockKeys;
    for (int64_t c = 0; c < tile.block.padded; c += kLanes) {
      vfloat sums[kSums] = {};
      for (int64_t i = 0; i < rows; ++i) sums[i % kSums] += load(ds + i * kBlockKeys + c);
      const vfloat sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
      for (int lane = 0; lane < kLanes; ++lane) total[c + lane] += sum[lane];
    }
  }
}

// Adds dS to the gradient of a per-query bias or of index_bias, for heads from `head` on.
void add_per_query_dbias(const Tile &tile, int64_t head, int64_t heads, const KeyGradients &sums) {
  const Block &block = tile.block;
  const int64_t rows = tile.task.rows;
  const bool run = !block.list_position && is_run(block.index, block.count);
  const int32_t *const to = block.list_position ? block.list_position : block.index;
  for (int64_t g = 0; g < heads; ++g)
    for (int64_t i = 0; i < rows; ++i) {
      const float *ds = tile.buffers.dscores + (g * rows + i) * kBlockKeys;
      float *row = sums.per_query_dbias + i * sums.dbias_row_stride;
      if (per_query_bias_heads(tile.p, tile.task.heads) > 1) row += (head + g) * sums.dbias_head_stride;
      if (run)
        for (int64_t c = 0, key = block.index[0]; c < block.count; ++c) row[key + c] += ds[c];
      else
        for (int64_t c = 0; c < block.count; ++c)
          if (block.index[c] >= 0) row[to[c]] += ds[c];
    }
}

// Converts gradients of biased scores to gradients of the products, without the scale.
void undo_cap(const Tile &tile, int64_t heads, const float *tanh) {
  if (tile.p.softcap <= 0) return;
  for (int64_t r = 0; r < heads * tile.task.rows; ++r) {
    const int64_t row = r * kBlockKeys;
    for (int64_t c = row; c < row + tile.block.padded; c += kLanes) {
      const vfloat x = load(tile.buffers.dscores + c), t = load(tanh + c);
      store(tile.buffers.dscores + c, x == 0.0f ? x : x * (1.0f - t * t)); // the tanh of a dropped score may be NaN
    }
  }
}

void add_rows(const Tile &tile, const float *rows, int64_t width, float *sums) {
  for (int64_t c = 0; c < tile.block.count; ++c) {
    if (tile.block.index[c] < 0) continue;
    float *sum = sums + tile.block.index[c] * width;
    for (int64_t d = 0; d < width; d += kLanes) store(sum + d, load(sum + d) + load(rows + c * width + d));
  }
}

void scatter_key_gradients(const Tile &tile, const KeyGradients &sums) {
  const TileBuffers &b = tile.buffers;
  if (sums.dk && !tile.reads_rows) add_rows(tile, b.dk, tile.dim, sums.dk);
  if (sums.dv && !tile.reads_rows) add_rows(tile, b.dv, tile.dim, sums.dv);
  if (!sums.dbias) return;
  for (int64_t g = 0; g < bias_heads(tile.p, tile.task.heads); ++g)
    for (int64_t c = 0; c < tile.block.count; ++c)
      if (tile.block.index[c] >= 0) sums.dbias[g * tile.p.keys + tile.block.index[c]] += b.dbias[g * kBlockKeys + c];
}

// Multiplies weights with rows of q or dout, for heads from `head` on. Adds the products directly to the gradients of
// keys, or to those of the block, which scatter_key_gradients adds later.
void add_key_products(const Tile &tile, int64_t head, int64_t heads, const float *weights, const float *x,
                      float *block_sums, float *sums) {
  const Block &block = tile.block;
  const int64_t rows = heads * tile.task.rows;
  const float *const first = x + head * tile.task.rows * tile.dim;
  if (tile.reads_rows)
    add_to_keys(heads, block.count, tile.dim, weights, first, block.index, sums);
  else
    product(block.count, tile.dim, rows, {weights, 1, kBlockKeys}, first, tile.dim, block_sums, tile.dim, head > 0);
}

void backward_rows(Tile &tile, const fdm_backward_args &args, const KeyGradients &sums) {
  const fdm_problem &p = tile.p;
  const TileTask &task = tile.task;
  const TileBuffers &b = tile.buffers;
  const bool need_dq = present(args.dq), need_ds = need_dq || sums.dk || sums.dbias || sums.per_query_dbias;
  first_pass(tile, args, need_ds || sums.dsink, sums.dsink);
  if (!need_ds && !sums.dv) return;
  float *dq = b.out;
  zero(dq, tile.row_count() * tile.dim);
  for (int64_t number = 0; number < tile.block_count(); ++number) {
    load_second_pass_block(tile, number, need_ds);
    if (sums.dbias)
      for (int64_t c = 0; c < bias_heads(p, task.heads) * kBlockKeys; ++c) b.dbias[c] = 0.0;
    for (int64_t head = 0; head < task.heads; head += tile.heads_at_once()) {
      const int64_t heads = min64(tile.heads_at_once(), task.heads - head);
      const float *tanh = second_pass(tile, number, head, heads, need_ds);
      if (sums.dv) add_key_products(tile, head, heads, b.scores, b.dout, b.dv, sums.dv);
      if (!need_ds) continue;
      if (sums.dbias) add_per_key_dbias(tile, head, heads);
      if (sums.per_query_dbias) add_per_query_dbias(tile, head, heads, sums);
      undo_cap(tile, heads, tanh);
      if (sums.dk) add_key_products(tile, head, heads, b.dscores, b.q, b.dk, sums.dk);
      if (need_dq) tile.add_weighted(head, heads, b.dscores, b.keys, b.values, tile.key_rows, dq);
    }
    scatter_key_gradients(tile, sums);
  }
  if (!need_dq) return;
  for (int64_t n = 0; n < tile.row_count() * tile.dim; n += kLanes) store(dq + n, load(dq + n) * p.scale);
  for (int64_t g = 0; g < task.heads; ++g)
    for (int64_t i = 0; i < task.rows; ++i)
      store_row(args.dq, row_offset(args.dq, task.sequence, task.first_row + i, task.head + g), args.dq.stride[3],
                p.head_dim, dq + (g * task.rows + i) * tile.dim);
}

// Calls body(sums) for each tile of a task, with the tile's rows of the bias gradient.
template <class Body>
void for_each_with_sums(Tile &tile, const fdm_backward_args &args, KeyGradients sums, const Body &body) {
  tile.for_each({&tile.p.q, &args.out, &args.dout}, [&] {
    body(sums);
    if (sums.per_query_dbias) sums.per_query_dbias += tile.task.rows * sums.dbias_row_stride;
  });
}

void backward_tile(const fdm_problem &p, const fdm_backward_args &args, const void *plan, const TileTask &task,
                   const KeyGradients &sums, void *scratch) {
  Tile tile(p, plan, task, true, scratch);
  for_each_with_sums(tile, args, sums, [&](const KeyGradients &head_sums) { backward_rows(tile, args, head_sums); });
}

void per_query_dbias_tile(const fdm_problem &p, const fdm_backward_args &args, const void *plan, const TileTask &task,
                          const KeyGradients &sums, void *scratch) {
  Tile tile(p, plan, task, true, scratch);
  for_each_with_sums(tile, args, sums, [&](const KeyGradients &head_sums) {
    first_pass(tile, args, true, nullptr);
    for (int64_t number = 0; number < tile.block_count(); ++number) {
      load_second_pass_block(tile, number, true);
      second_pass(tile, number, 0, 1, true);
      add_per_query_dbias(tile, 0, 1, head_sums);
    }
  });
}

} // namespace
} // namespace fdm::cpu::FDM_SIMD_NAMESPACE
