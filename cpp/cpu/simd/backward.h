// SPDX-License-Identifier: BSD-3-Clause
// Backward pass of one tile: dq of its rows, and what it adds to dk, dv and dbias of its columns.
//
// With dP = dO V', delta_i = sum_j P_ij dP_ij - dlse_i and dS = P (dP - delta), dV = P' dO, dbias = dS, and dQ = dS' K,
// dK = dS'' Q with dS' = scale dS (1 - tanh^2).
//
// A row of dS sums to dlse_i. Where one key has nearly all of the row's weight its dS is what is left of a difference of
// nearly equal numbers, and where dS is summed over keys, as for a parameter that shifts all biases, so is the sum. So
// the tile is looked at twice: first for the sums of P and of P dP over the row, then with a delta that is of the very
// same P and dP, whose rounding then cancels as it does for the formula. The P of lse and the delta of O, which other
// kernels take, have rounding of their own. P and dP are saved in between, as far as there is room.
#pragma once

#include "forward.h"

namespace fdm::cpu::FDM_SIMD_NAMESPACE {
namespace {

// The first look takes exponentials relative to lse, whose rounding drops out, unless it is so large that they might
// overflow: biases that stand for "masked" bring whole rows to -1e9 and beyond. There it takes the maximum.
constexpr float kCoarseLse = 256.0f;

// row_max such that P = exp(score - row_max) / sum; +inf for empty rows, whose P is exp(-inf) = 0.
void load_shifts(Tile &tile, const fdm_backward_args &args) {
  const TileTask &task = tile.task;
  const TileBuffers &b = tile.buffers;
  bool recompute = false;
  for (int64_t g = 0; g < task.heads; ++g)
    for (int64_t i = 0; i < task.rows; ++i) {
      const int64_t at = lse_offset(args.lse, task.sequence, task.first_row + i, task.head + g);
      const float lse = static_cast<const float *>(args.lse.data)[at];
      b.row_max[g * task.rows + i] = lse == -kInfinity ? kInfinity : lse;
      recompute |= __builtin_fabsf(lse) >= kCoarseLse && lse != -kInfinity;
    }
  if (!recompute) return;
  start_rows(tile);
  for (int64_t number = 0; number < tile.block_count(); ++number) {
    tile.load_block(number);
    for (int64_t head = 0; head < task.heads; ++head) {
      tile.make_scores(head, 1, b.scores, nullptr);
      for (int64_t i = 0; i < task.rows; ++i)
        softmax_row(b.scores + i * kBlockKeys, tile.block.padded, b.row_max[head * task.rows + i],
                    b.row_sum[head * task.rows + i]);
    }
  }
  for (int64_t r = 0; r < tile.row_count(); ++r)
    if (b.row_sum[r] == 0.0f) b.row_max[r] = kInfinity;
}

// Q and dO, and in row_delta about what the first look will find: dO . O. `out` serves as the buffer of O; it becomes dq
// later. Empty rows have no gradient, whatever they hold and whatever comes in.
void prepare(Tile &tile, const fdm_backward_args &args) {
  const TileBuffers &b = tile.buffers;
  tile.load_rows(tile.p.q, b.q);
  load_shifts(tile, args);
  tile.load_rows(args.dout, b.dout);
  tile.load_rows(args.out, b.out);
  for (int64_t r = 0; r < tile.row_count(); ++r) {
    float *dout = b.dout + r * tile.dim;
    vfloat sum{};
    if (b.row_max[r] == kInfinity) {
      zero(dout, tile.dim);
      zero(b.q + r * tile.dim, tile.dim);
    } else {
      for (int64_t d = 0; d < tile.dim; d += kLanes) sum += load(dout + d) * load(b.out + r * tile.dim + d);
    }
    b.row_delta[r] = horizontal_sum(sum);
    zero(b.row_sums + r * kLanes, kLanes);
    zero(b.row_moments + r * kLanes, kLanes);
  }
}

void load_value_block(const Tile &tile) {
  const TileBuffers &b = tile.buffers;
  gather_keys(tile.p, tile.p.v, tile.task, tile.block.index, tile.block.count, tile.block.padded, b.values);
  transpose(b.values, tile.block.padded, tile.dim, b.values_t, kBlockKeys);
}

// Matrices of one block for the rows of some heads.
struct ScoreBlock {
  float *p, *dp, *tanh;
};

// Where the first look leaves a block: saved, or in the buffers that the next one overwrites.
ScoreBlock score_block(const Tile &tile, int64_t number, int64_t head) {
  const TileBuffers &b = tile.buffers;
  if (number >= b.saved_blocks) return {b.scores, b.dscores, b.tanh};
  const int64_t at = (number * tile.row_count() + head * tile.task.rows) * kBlockKeys;
  return {b.saved_p + at, b.saved_dp + at, tile.p.softcap > 0 ? b.saved_tanh + at : nullptr};
}

// P (dP - delta), but 0 where P is: what the key holds there, NaN for one, is not this row's.
inline vfloat score_gradient(vfloat p, vfloat dp, float delta) { return p == 0.0f ? p : p * (dp - delta); }

// exp(score - row_max), and dP if it is needed. Adds them to the sums of their rows, of P and of P (dP - row_delta):
// vectors of partial sums.
void look_at_block(const Tile &tile, int64_t head, int64_t heads, const ScoreBlock &to, bool need_dp) {
  const TileBuffers &b = tile.buffers;
  const int64_t first = head * tile.task.rows, rows = heads * tile.task.rows;
  tile.make_scores(head, heads, to.p, to.tanh);
  if (need_dp)
    product(rows, tile.block.padded, tile.dim, {b.dout + first * tile.dim, tile.dim, 1}, b.values_t, kBlockKeys, to.dp,
            kBlockKeys, false);
  for (int64_t r = 0; r < rows; ++r) {
    const float shift = b.row_max[first + r], delta = b.row_delta[first + r];
    float *p = to.p + r * kBlockKeys, *dp = to.dp + r * kBlockKeys;
    float *sums = b.row_sums + (first + r) * kLanes, *moments = b.row_moments + (first + r) * kLanes;
    vfloat sum{}, moment{};
    for (int64_t c = 0; c < tile.block.padded; c += kLanes) {
      const vfloat weight = exponential(load(p + c) - shift);
      store(p + c, weight);
      sum += weight;
      if (need_dp) moment += score_gradient(weight, load(dp + c), delta);
    }
    store(sums, load(sums) + sum);
    store(moments, load(moments) + moment);
  }
}

double exact_sum(const float *lanes) {
  double sum = 0.0;
  for (int i = 0; i < kLanes; ++i) sum += lanes[i];
  return sum;
}

// Looks at all blocks of a tile, then puts the sums of P in row_sum and delta in row_delta.
void first_look(Tile &tile, const fdm_backward_args &args, bool need_dp) {
  const TileTask &task = tile.task;
  const TileBuffers &b = tile.buffers;
  prepare(tile, args);
  for (int64_t number = 0; number < tile.block_count(); ++number) {
    tile.load_block(number);
    if (need_dp) load_value_block(tile);
    for (int64_t head = 0; head < task.heads; head += tile.heads_at_once()) {
      const int64_t heads = min64(tile.heads_at_once(), task.heads - head);
      look_at_block(tile, head, heads, score_block(tile, number, head), need_dp);
    }
  }
  for (int64_t g = 0; g < task.heads; ++g)
    for (int64_t i = 0; i < task.rows; ++i) {
      const int64_t r = g * task.rows + i;
      const double sum = exact_sum(b.row_sums + r * kLanes), moment = exact_sum(b.row_moments + r * kLanes);
      const bool empty = b.row_max[r] == kInfinity || sum == 0.0;
      double delta = empty ? 0.0 : b.row_delta[r] + moment / sum;
      if (present(args.dlse) && !empty) {
        const int64_t at = lse_offset(args.dlse, task.sequence, task.first_row + i, task.head + g);
        delta -= static_cast<const float *>(args.dlse.data)[at];
      }
      b.row_sum[r] = empty ? 1.0f : float(sum);
      b.row_delta[r] = float(delta);
    }
}

// For the second look: K of a block, and V if what the first one found is not saved.
void load_again(Tile &tile, int64_t number, bool need_dp) {
  if (tile.block_count() == 1) return; // nothing was loaded since
  if (number < tile.buffers.saved_blocks) {
    tile.open_block(number);
    tile.load_keys();
    return;
  }
  tile.load_block(number);
  if (need_dp) load_value_block(tile);
}

// P in scores, dS in dscores; returns the tanh that belong to them.
const float *look_again(const Tile &tile, int64_t number, int64_t head, int64_t heads, bool need_dp) {
  const TileBuffers &b = tile.buffers;
  const int64_t first = head * tile.task.rows;
  const ScoreBlock from = score_block(tile, number, head);
  if (number >= b.saved_blocks) look_at_block(tile, head, heads, from, need_dp);
  for (int64_t r = 0; r < heads * tile.task.rows; ++r) {
    const float inverse = 1.0f / b.row_sum[first + r], delta = b.row_delta[first + r];
    const int64_t row = r * kBlockKeys;
    for (int64_t c = row; c < row + tile.block.padded; c += kLanes) {
      const vfloat p = load(from.p + c) * inverse;
      store(b.scores + c, p);
      if (need_dp) store(b.dscores + c, score_gradient(p, load(from.dp + c), delta));
    }
  }
  return from.tanh;
}

// Sums dS over the rows that share a bias: of a tile in float32, by four rows, of tiles in float64.
void add_bias_gradients(const Tile &tile, int64_t head, int64_t heads) {
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

// From the gradient of the biased score to that of the product, but for the scale.
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
  first_look(tile, args, need_ds);
  float *dq = b.out;
  zero(dq, tile.row_count() * tile.dim);
  for (int64_t number = 0; number < tile.block_count(); ++number) {
    load_again(tile, number, need_ds);
    const int64_t count = tile.block.count;
    if (to.dbias)
      for (int64_t c = 0; c < bias_heads(p, task.heads) * kBlockKeys; ++c) b.dbias[c] = 0.0;
    for (int64_t head = 0; head < task.heads; head += tile.heads_at_once()) {
      const int64_t heads = min64(tile.heads_at_once(), task.heads - head), rows = heads * task.rows;
      const int64_t first = head * task.rows * tile.dim;
      const float *tanh = look_again(tile, number, head, heads, need_ds);
      if (to.dv)
        product(count, tile.dim, rows, {b.scores, 1, kBlockKeys}, b.dout + first, tile.dim, b.dv, tile.dim, head > 0);
      if (!need_ds) continue;
      if (to.dbias) add_bias_gradients(tile, head, heads);
      undo_cap(tile, heads, tanh);
      if (to.dk)
        product(count, tile.dim, rows, {b.dscores, 1, kBlockKeys}, b.q + first, tile.dim, b.dk, tile.dim, head > 0);
      if (need_dq)
        tile.with_kept_rows(head, heads, b.keys, b.values, [&](int64_t part, int64_t parts, const float *keys) {
          product(parts * task.rows, tile.dim, count,
                  {b.dscores + (part - head) * task.rows * kBlockKeys, kBlockKeys, 1}, keys, tile.dim,
                  dq + part * task.rows * tile.dim, tile.dim, true);
        });
    }
    scatter_key_gradients(tile, to);
  }
  if (!need_dq) return;
  for (int64_t at = 0; at < tile.row_count() * tile.dim; at += kLanes) store(dq + at, load(dq + at) * p.scale);
  for (int64_t g = 0; g < task.heads; ++g)
    for (int64_t i = 0; i < task.rows; ++i)
      store_row(args.dq, row_offset(args.dq, task.sequence, task.first_row + i, task.head + g), args.dq.stride[3],
                p.head_dim, dq + (g * task.rows + i) * tile.dim);
}

void bias_gradient_tile(const fdm_problem &p, const fdm_backward_args &args, const void *plan, const TileTask &task,
                        float *dbias, int64_t row_stride, void *scratch) {
  Tile tile(p, plan, task, true, scratch);
  first_look(tile, args, true);
  for (int64_t number = 0; number < tile.block_count(); ++number) {
    load_again(tile, number, true);
    look_again(tile, number, 0, 1, true);
    for (int64_t i = 0; i < task.rows; ++i)
      for (int64_t c = 0; c < tile.block.count; ++c)
        if (tile.block.index[c] >= 0)
          dbias[i * row_stride + tile.block.index[c]] += tile.buffers.dscores[i * kBlockKeys + c];
  }
}

} // namespace
} // namespace fdm::cpu::FDM_SIMD_NAMESPACE
