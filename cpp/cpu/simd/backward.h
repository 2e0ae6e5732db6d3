// SPDX-License-Identifier: BSD-3-Clause
// Backward pass of one tile: dq of its rows, and what it adds to dk, dv and dbias of its columns.
//
// With P recomputed from lse, dV = P' dO, dP = dO V', dS = P (dP - delta), delta_i = dO_i . O_i - dlse_i,
// dbias = dS, and dQ = dS' K, dK = dS'' Q with dS' = scale dS (1 - tanh^2).
#pragma once

#include "forward.h"

namespace fdm::cpu::FDM_SIMD_NAMESPACE {
namespace {

// From this magnitude on lse has lost digits of log(sum) to rounding, and at -1e9 all of them: P, which depends on them
// exponentially, cannot be recomputed from lse alone. Biases that stand for "masked" bring whole rows there.
constexpr float kCoarseLse = 256.0f; // steps of 3e-5

// row_max and row_sum such that P = exp(score - row_max) / row_sum.
void load_statistics(Tile &tile, const fdm_backward_args &args) {
  const TileTask &task = tile.task;
  const TileBuffers &b = tile.buffers;
  bool recompute = false;
  for (int64_t g = 0; g < task.heads; ++g)
    for (int64_t i = 0; i < task.rows; ++i) {
      const int64_t at = lse_offset(args.lse, task.sequence, task.first_row + i, task.head + g);
      const float lse = static_cast<const float *>(args.lse.data)[at];
      b.row_max[g * task.rows + i] = lse == -kInfinity ? kInfinity : lse; // an empty row: P = exp(-inf) = 0
      b.row_sum[g * task.rows + i] = 1.0f;
      recompute |= __builtin_fabsf(lse) >= kCoarseLse && lse != -kInfinity;
    }
  if (!recompute) return;
  start_rows(tile);
  for (int64_t first = 0; first < tile.columns.count; first += kBlockKeys) {
    tile.load_block(first);
    for (int64_t head = 0; head < task.heads; ++head) {
      tile.make_scores(head, 1, b.scores, nullptr);
      for (int64_t i = 0; i < task.rows; ++i)
        softmax_row(b.scores + i * kBlockKeys, tile.block.padded, b.row_max[head * task.rows + i],
                    b.row_sum[head * task.rows + i]);
    }
  }
  for (int64_t r = 0; r < tile.row_count(); ++r)
    if (b.row_sum[r] == 0.0f) b.row_max[r] = kInfinity, b.row_sum[r] = 1.0f;
}

// dO, and delta. `out` serves as the buffer of O; it becomes dq later. Empty rows have no gradient, whatever comes in.
void load_output_gradient(const Tile &tile, const fdm_backward_args &args) {
  const TileTask &task = tile.task;
  const TileBuffers &b = tile.buffers;
  tile.load_rows(args.dout, b.dout);
  tile.load_rows(args.out, b.out);
  for (int64_t g = 0; g < task.heads; ++g)
    for (int64_t i = 0; i < task.rows; ++i) {
      const int64_t r = g * task.rows + i;
      float *dout = b.dout + r * tile.dim;
      vfloat sum{};
      if (b.row_max[r] == kInfinity) {
        zero(dout, tile.dim);
        b.row_delta[r] = 0.0f;
        continue;
      }
      for (int64_t d = 0; d < tile.dim; d += kLanes) sum += load(dout + d) * load(b.out + r * tile.dim + d);
      b.row_delta[r] = horizontal_sum(sum);
      if (present(args.dlse)) {
        const int64_t at = lse_offset(args.dlse, task.sequence, task.first_row + i, task.head + g);
        b.row_delta[r] -= static_cast<const float *>(args.dlse.data)[at];
      }
    }
}

void prepare(Tile &tile, const fdm_backward_args &args) {
  tile.load_rows(tile.p.q, tile.buffers.q);
  load_statistics(tile, args);
  load_output_gradient(tile, args);
}

void load_value_block(const Tile &tile) {
  const TileBuffers &b = tile.buffers;
  gather_keys(tile.p, tile.p.v, tile.task, tile.block.index, tile.block.count, tile.block.padded, b.values);
  transpose(b.values, tile.block.padded, tile.dim, b.values_t, kBlockKeys);
}

// P, in the place of the scores.
void make_probabilities(const Tile &tile, int64_t head, int64_t heads) {
  const TileBuffers &b = tile.buffers;
  tile.make_scores(head, heads, b.scores, b.tanh);
  const int64_t first = head * tile.task.rows;
  for (int64_t r = 0; r < heads * tile.task.rows; ++r) {
    const float shift = b.row_max[first + r], inverse = 1.0f / b.row_sum[first + r];
    float *row = b.scores + r * kBlockKeys;
    for (int64_t c = 0; c < tile.block.padded; c += kLanes)
      store(row + c, exponential(load(row + c) - shift) * inverse);
  }
}

// dS in dscores. P is in scores.
void make_score_gradients(const Tile &tile, int64_t head, int64_t heads) {
  const TileBuffers &b = tile.buffers;
  const int64_t first = head * tile.task.rows, rows = heads * tile.task.rows;
  product(rows, tile.block.padded, tile.dim, {b.dout + first * tile.dim, tile.dim, 1}, b.values_t, kBlockKeys,
          b.dscores, kBlockKeys, false);
  for (int64_t r = 0; r < rows; ++r) {
    const float *p = b.scores + r * kBlockKeys;
    float *ds = b.dscores + r * kBlockKeys;
    for (int64_t c = 0; c < tile.block.padded; c += kLanes)
      store(ds + c, load(p + c) * (load(ds + c) - b.row_delta[first + r]));
  }
}

// Sums dS over the rows that share a bias.
void add_bias_gradients(const Tile &tile, int64_t head, int64_t heads) {
  const int64_t rows = tile.task.rows;
  for (int64_t g = 0; g < heads; ++g) {
    float *sum = tile.buffers.dbias + (bias_heads(tile.p, tile.task.heads) > 1 ? head + g : 0) * kBlockKeys;
    for (int64_t i = 0; i < rows; ++i) {
      const float *ds = tile.buffers.dscores + (g * rows + i) * kBlockKeys;
      for (int64_t c = 0; c < tile.block.padded; c += kLanes) store(sum + c, load(sum + c) + load(ds + c));
    }
  }
}

// From the gradient of the biased score to that of q.k.
void undo_scale_and_cap(const Tile &tile, int64_t heads) {
  const TileBuffers &b = tile.buffers;
  for (int64_t r = 0; r < heads * tile.task.rows; ++r) {
    float *ds = b.dscores + r * kBlockKeys;
    const float *tanh = b.tanh + r * kBlockKeys;
    for (int64_t c = 0; c < tile.block.padded; c += kLanes) {
      vfloat x = load(ds + c) * tile.p.scale;
      if (tile.p.softcap > 0) x *= 1.0f - load(tanh + c) * load(tanh + c);
      store(ds + c, x);
    }
  }
}

void add_rows(const Tile &tile, const float *from, int64_t width, float *to) {
  for (int64_t c = 0; c < tile.block.count; ++c) {
    if (tile.block.index[c] < 0) continue;
    float *row = to + tile.block.index[c] * width;
    for (int64_t d = 0; d < width; d += kLanes) store(row + d, load(row + d) + load(from + c * width + d));
  }
}

void scatter_key_gradients(const Tile &tile, const KeyGradients &to) {
  const TileBuffers &b = tile.buffers;
  if (to.dk) add_rows(tile, b.dk, tile.dim, to.dk);
  if (to.dv) add_rows(tile, b.dv, tile.dim, to.dv);
  if (!to.dbias) return;
  for (int64_t g = 0; g < bias_heads(tile.p, tile.task.heads); ++g)
    for (int64_t c = 0; c < tile.block.count; ++c)
      if (tile.block.index[c] >= 0) to.dbias[g * tile.p.keys + tile.block.index[c]] += b.dbias[g * kBlockKeys + c];
}

void backward_tile(const fdm_problem &p, const fdm_backward_args &args, const void *plan, const TileTask &task,
                   const KeyGradients &to, void *scratch) {
  Tile tile(p, plan, task, true, scratch);
  const TileBuffers &b = tile.buffers;
  const bool need_dq = present(args.dq), need_ds = need_dq || to.dk || to.dbias;
  prepare(tile, args);
  float *dq = b.out;
  zero(dq, tile.row_count() * tile.dim);
  for (int64_t at = 0; at < tile.columns.count; at += kBlockKeys) {
    tile.load_block(at);
    if (need_ds) load_value_block(tile);
    const int64_t count = tile.block.count;
    if (to.dbias) zero(b.dbias, bias_heads(p, task.heads) * kBlockKeys);
    for (int64_t head = 0; head < task.heads; head += tile.heads_at_once()) {
      const int64_t heads = min64(tile.heads_at_once(), task.heads - head), rows = heads * task.rows;
      const int64_t first = head * task.rows * tile.dim;
      make_probabilities(tile, head, heads);
      if (to.dv)
        product(count, tile.dim, rows, {b.scores, 1, kBlockKeys}, b.dout + first, tile.dim, b.dv, tile.dim, head > 0);
      if (!need_ds) continue;
      make_score_gradients(tile, head, heads);
      if (to.dbias) add_bias_gradients(tile, head, heads);
      undo_scale_and_cap(tile, heads);
      if (to.dk)
        product(count, tile.dim, rows, {b.dscores, 1, kBlockKeys}, b.q + first, tile.dim, b.dk, tile.dim, head > 0);
      if (need_dq)
        product(rows, tile.dim, count, {b.dscores, kBlockKeys, 1}, b.keys, tile.dim, dq + first, tile.dim, true);
    }
    scatter_key_gradients(tile, to);
  }
  if (!need_dq) return;
  for (int64_t g = 0; g < task.heads; ++g)
    for (int64_t i = 0; i < task.rows; ++i)
      store_row(args.dq, row_offset(args.dq, task.sequence, task.first_row + i, task.head + g), args.dq.stride[3],
                p.head_dim, dq + (g * task.rows + i) * tile.dim);
}

void bias_gradient_tile(const fdm_problem &p, const fdm_backward_args &args, const void *plan, const TileTask &task,
                        float *dbias, int64_t row_stride, void *scratch) {
  Tile tile(p, plan, task, true, scratch);
  prepare(tile, args);
  for (int64_t at = 0; at < tile.columns.count; at += kBlockKeys) {
    tile.load_block(at);
    load_value_block(tile);
    make_probabilities(tile, 0, 1);
    make_score_gradients(tile, 0, 1);
    for (int64_t i = 0; i < task.rows; ++i)
      for (int64_t c = 0; c < tile.block.count; ++c)
        if (tile.block.index[c] >= 0)
          dbias[i * row_stride + tile.block.index[c]] += tile.buffers.dscores[i * kBlockKeys + c];
  }
}

} // namespace
} // namespace fdm::cpu::FDM_SIMD_NAMESPACE
