// SPDX-License-Identifier: BSD-3-Clause
// Forward pass of one tile: softmax over blocks of columns, with a running maximum and sum for each row.
#pragma once

#include "tile.h"

namespace fdm::cpu::FDM_SIMD_NAMESPACE {
namespace {

// Replaces a row of scores by exp(score - maximum), and updates the row's running maximum and sum. Returns the factor
// that rescales earlier sums. Once a row has a score of +inf its sum is +inf, and its output NaN.
inline float softmax_row(float *scores, int64_t count, float &row_max, float &row_sum) {
  vfloat largest = splat(row_max);
  for (int64_t c = 0; c < count; c += kLanes) largest = maximum(load(scores + c), largest);
  const float new_max = horizontal_max(largest);
  // A row without kept keys so far: subtracting 0 keeps exp(-inf) = 0.
  const float shift = new_max == -kInfinity ? 0.0f : new_max;
  vfloat sum{};
  for (int64_t c = 0; c < count; c += kLanes) {
    const vfloat score = load(scores + c);
    // inf - inf would be NaN, which the logarithm of the sum must be only if a score is.
    const vfloat e = shift < kInfinity ? exponential(score - shift) : score < kInfinity ? splat(0.0f) : score;
    store(scores + c, e);
    sum += e;
  }
  const float factor = new_max == row_max ? 1.0f : __builtin_expf(row_max - shift);
  row_sum = row_sum * factor + horizontal_sum(sum);
  row_max = new_max;
  return factor;
}

// The term of the sink of head g of a tile in a sum of exponentials relative to `row_max`.
inline float sink_weight(const Tile &tile, int64_t g, float row_max) {
  const fdm_tensor &sink = tile.p.sink;
  if (!present(sink)) return 0.0f;
  const float score = load_scalar(sink.data, sink.dtype, (tile.task.head + g) * sink.stride[0]);
  return __builtin_expf(float(double(score) - tile.reference(g)) - row_max);
}

inline void start_rows(const Tile &tile) {
  for (int64_t r = 0; r < tile.row_count(); ++r) {
    tile.buffers.row_max[r] = -kInfinity;
    tile.buffers.row_sum[r] = 0.0f;
  }
}

void add_values(const Tile &tile, int64_t head, int64_t heads) {
  const TileBuffers &b = tile.buffers;
  const int64_t first = head * tile.task.rows, rows = heads * tile.task.rows;
  for (int64_t r = 0; r < rows; ++r) {
    float *out = b.out + (first + r) * tile.dim;
    const float factor =
        softmax_row(b.scores + r * kBlockKeys, tile.block.padded, b.row_max[first + r], b.row_sum[first + r]);
    if (factor != 1.0f)
      for (int64_t d = 0; d < tile.dim; d += kLanes) store(out + d, load(out + d) * factor);
  }
  tile.add_weighted(head, heads, b.scores, b.values, b.keys, tile.value_rows, b.out);
}

void write_rows(const Tile &tile, const fdm_forward_args &args) {
  const TileTask &task = tile.task;
  for (int64_t g = 0; g < task.heads; ++g)
    for (int64_t i = 0; i < task.rows; ++i) {
      const int64_t r = g * task.rows + i, row = task.first_row + i;
      float *out = tile.buffers.out + r * tile.dim;
      const float sum = tile.buffers.row_sum[r];
      if (sum == 0.0f) {
        zero(out, tile.dim); // a non-finite value that other rows keep turns the zero weights of this row into NaN
      } else {
        const float inverse = 1.0f / (sum + sink_weight(tile, g, tile.buffers.row_max[r]));
        for (int64_t d = 0; d < tile.dim; ++d) out[d] *= inverse;
      }
      store_row(args.out, row_offset(args.out, task.sequence, row, task.head + g), args.out.stride[3], tile.p.head_dim,
                out);
      const float lse = sum == 0.0f ? -kInfinity : tile.buffers.row_max[r] + __builtin_logf(sum);
      const int64_t offset = head_major_offset(args.lse, task.sequence, row, task.head + g);
      store_scalar(args.lse.data, args.lse.dtype, offset, double(lse) + tile.reference(g));
    }
}

void forward_rows(Tile &tile, const fdm_forward_args &args) {
  const TileTask &task = tile.task;
  const TileBuffers &b = tile.buffers;
  tile.load_rows(tile.p.q, b.q);
  zero(b.out, tile.row_count() * tile.dim);
  start_rows(tile);
  for (int64_t number = 0; number < tile.block_count(); ++number) {
    tile.load_block(number);
    tile.load_values();
    for (int64_t head = 0; head < task.heads; head += tile.heads_at_once()) {
      const int64_t heads = min64(tile.heads_at_once(), task.heads - head);
      tile.make_scores(head, heads, b.scores, nullptr);
      add_values(tile, head, heads);
    }
  }
  write_rows(tile, args);
}

void forward_tile(const fdm_problem &p, const fdm_forward_args &args, const void *plan, const TileTask &task,
                  void *scratch) {
  Tile tile(p, plan, task, false, scratch);
  tile.for_each({&p.q, &args.out}, [&] { forward_rows(tile, args); });
}

} // namespace
} // namespace fdm::cpu::FDM_SIMD_NAMESPACE
