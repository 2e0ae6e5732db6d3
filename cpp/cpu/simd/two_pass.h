// SPDX-License-Identifier: BSD-3-Clause
// The two passes of the backward kernel over P and dP of a tile.
//
// A row of dS sums to dlse_i. If one key has nearly all weight of a row, its dS is a difference of nearly equal
// numbers. Sums of dS over keys, as for a parameter that shifts all biases, have the same problem. Therefore the
// kernel visits the tile twice. The first pass computes the sums of P and of P dP over each row. The second pass uses
// a delta from the very same P and dP, so that their rounding errors cancel as in exact arithmetic. P from lse and
// delta from O, which other kernels use, have separate rounding errors. P and dP are saved between the passes as far
// as there is room.
#pragma once

#include "forward.h"

namespace fdm::cpu::FDM_SIMD_NAMESPACE {
namespace {

// The first pass computes exponentials relative to lse, whose rounding cancels. If lse is so large that they might
// overflow, it uses the maximum: biases that stand for "masked" bring whole rows to -1e9 and beyond.
constexpr float kCoarseLse = 256.0f;

// Sets row_max such that P = exp(score - row_max) / sum; +inf for empty rows, whose P is exp(-inf) = 0, and NaN for rows
// with a score of +inf, whose P is NaN.
void load_shifts(Tile &tile, const fdm_tensor &row_lse) {
  const TileTask &task = tile.task;
  const TileBuffers &b = tile.buffers;
  bool recompute = false;
  for (int64_t g = 0; g < task.heads; ++g)
    for (int64_t i = 0; i < task.rows; ++i) {
      const int64_t offset = head_major_offset(row_lse, task.sequence, task.first_row + i, task.head + g);
      const float lse = float(load_double(row_lse.data, row_lse.dtype, offset) - tile.reference(g));
      b.row_max[g * task.rows + i] = lse == -kInfinity ? kInfinity : lse == kInfinity ? kNan : lse;
      recompute |= __builtin_fabsf(lse) >= kCoarseLse && __builtin_fabsf(lse) != kInfinity;
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
    if (b.row_sum[r] == 0.0f)
      b.row_max[r] = kInfinity;
    else if (b.row_max[r] == kInfinity)
      b.row_max[r] = kNan;
}

// Loads Q and dO, and sets row_delta to dO . O, an estimate of the result of the first pass. `out` holds O; it
// becomes dQ later. Empty rows have no gradient, whatever their contents and dO.
void prepare(Tile &tile, const fdm_backward_args &args) {
  const TileBuffers &b = tile.buffers;
  tile.load_rows(tile.p.q, b.q);
  load_shifts(tile, args.lse);
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

void load_value_block(Tile &tile) {
  const TileBuffers &b = tile.buffers;
  tile.load_values();
  if (!tile.reads_rows) transpose(b.values, tile.block.padded, tile.dim, b.values_t, kBlockKeys);
}

// The matrices of one block for the rows of some heads.
struct ScoreBlock {
  float *p, *dp, *tanh;
};

// The location of the first pass's results for a block: saved, or in the buffers that the next block overwrites.
ScoreBlock score_block(const Tile &tile, int64_t number, int64_t head) {
  const TileBuffers &b = tile.buffers;
  if (number >= b.saved_blocks) return {b.scores, b.dscores, b.tanh};
  const int64_t offset = (number * tile.row_count() + head * tile.task.rows) * kBlockKeys;
  return {b.saved_p + offset, b.saved_dp + offset, tile.p.softcap > 0 ? b.saved_tanh + offset : nullptr};
}

// P (dP - delta), but 0 where P is 0: a row that drops a key must not see its values, such as NaN.
inline vfloat score_gradient(vfloat p, vfloat dp, float delta) { return p == 0.0f ? p : p * (dp - delta); }

// Computes exp(score - row_max), and dP if needed. Adds them to the partial-sum vectors of their rows, for P and for
// P (dP - row_delta).
void first_pass_block(const Tile &tile, int64_t head, int64_t heads, const ScoreBlock &result, bool need_dp) {
  const TileBuffers &b = tile.buffers;
  const int64_t first = head * tile.task.rows, rows = heads * tile.task.rows;
  tile.make_scores(head, heads, result.p, result.tanh);
  if (need_dp) tile.multiply(head, heads, b.dout, b.values_t, tile.value_rows, result.dp);
  for (int64_t r = 0; r < rows; ++r) {
    const float shift = b.row_max[first + r], delta = b.row_delta[first + r];
    float *p = result.p + r * kBlockKeys, *dp = result.dp + r * kBlockKeys;
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
  double sums[4] = {}; // independent sums that overlap
  for (int i = 0; i < kLanes; ++i) sums[i % 4] += lanes[i];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// The part of the sink in a row's sum, capped at kSinkWeightLimit times the rest of the sum. Beyond that P is nearly
// 0, but it must not be 0: P times dlse, which excludes the sink, is divided by it again.
double row_sink_weight(const Tile &tile, int64_t g, double sum, float row_max) {
  constexpr double kSinkWeightLimit = 0x1p64;
  const double weight = sink_weight(tile, g, row_max), max_weight = kSinkWeightLimit * sum;
  return weight > max_weight ? max_weight : weight;
}

// Runs the first pass over all blocks of a tile, then sets row_sum to the sums of P and row_delta to delta. If dsink
// is not null, adds the sink gradients of the task's heads: a sink has a P too, and its dP is 0.
void first_pass(Tile &tile, const fdm_backward_args &args, bool need_dp, double *dsink) {
  const TileTask &task = tile.task;
  const TileBuffers &b = tile.buffers;
  prepare(tile, args);
  for (int64_t number = 0; number < tile.block_count(); ++number) {
    tile.load_block(number);
    if (need_dp) load_value_block(tile);
    for (int64_t head = 0; head < task.heads; head += tile.heads_at_once()) {
      const int64_t heads = min64(tile.heads_at_once(), task.heads - head);
      first_pass_block(tile, head, heads, score_block(tile, number, head), need_dp);
    }
  }
  for (int64_t g = 0; g < task.heads; ++g)
    for (int64_t i = 0; i < task.rows; ++i) {
      const int64_t r = g * task.rows + i;
      const double sum = exact_sum(b.row_sums + r * kLanes), moment = exact_sum(b.row_moments + r * kLanes);
      const bool empty = b.row_max[r] == kInfinity || sum == 0.0;
      const double sink = empty ? 0.0 : row_sink_weight(tile, g, sum, b.row_max[r]), total = sum + sink;
      double delta = empty ? 0.0 : (b.row_delta[r] * sum + moment) / total;
      if (dsink && !empty) dsink[g] -= sink / total * delta;
      if (present(args.dlse) && !empty) {
        const int64_t offset = head_major_offset(args.dlse, task.sequence, task.first_row + i, task.head + g);
        delta -= load_double(args.dlse.data, args.dlse.dtype, offset) * (total / sum);
      }
      b.row_sum[r] = empty ? 1.0f : float(total);
      b.row_delta[r] = float(delta);
    }
}

// Loads for the second pass: K of a block, and V if the results of the first pass are not saved.
void load_second_pass_block(Tile &tile, int64_t number, bool need_dp) {
  if (tile.block_count() == 1) return; // the only block is still loaded
  if (number < tile.buffers.saved_blocks) {
    tile.open_block(number);
    tile.load_keys();
    return;
  }
  tile.load_block(number);
  if (need_dp) load_value_block(tile);
}

// Writes P to scores and dS to dscores; returns the tanh of the block.
const float *second_pass(const Tile &tile, int64_t number, int64_t head, int64_t heads, bool need_dp) {
  const TileBuffers &b = tile.buffers;
  const int64_t first = head * tile.task.rows;
  const ScoreBlock found = score_block(tile, number, head);
  if (number >= b.saved_blocks) first_pass_block(tile, head, heads, found, need_dp);
  for (int64_t r = 0; r < heads * tile.task.rows; ++r) {
    const float inverse = 1.0f / b.row_sum[first + r], delta = b.row_delta[first + r];
    const int64_t row = r * kBlockKeys;
    for (int64_t c = row; c < row + tile.block.padded; c += kLanes) {
      const vfloat p = load(found.p + c) * inverse;
      store(b.scores + c, p);
      if (need_dp) store(b.dscores + c, score_gradient(p, load(found.dp + c), delta));
    }
  }
  return found.tanh;
}

} // namespace
} // namespace fdm::cpu::FDM_SIMD_NAMESPACE
