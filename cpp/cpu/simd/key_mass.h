// SPDX-License-Identifier: BSD-3-Clause
// The probabilities that the rows of a tile give to each key.
#pragma once

#include "two_pass.h"

namespace fdm::cpu::FDM_SIMD_NAMESPACE {
namespace {

// Sets row_sum to the factor of a row's exponentials. Relative to lse they sum to 1. If load_shifts has recomputed
// the row's maximum and sum, those determine the factor.
void load_factors(Tile &tile, const fdm_tensor &lse) {
  const TileBuffers &b = tile.buffers;
  for (int64_t r = 0; r < tile.row_count(); ++r) b.row_sum[r] = 1.0f;
  load_shifts(tile, lse);
  for (int64_t g = 0; g < tile.task.heads; ++g)
    for (int64_t r = g * tile.task.rows; r < (g + 1) * tile.task.rows; ++r) {
      const bool empty = b.row_max[r] == kInfinity;
      if (empty) zero(b.q + r * tile.dim, tile.dim); // whatever its contents
      b.row_sum[r] = empty ? 0.0f : 1.0f / (b.row_sum[r] + sink_weight(tile, g, b.row_max[r]));
    }
}

// Converts scores of a head to probabilities, and adds them to the sums of their keys.
void add_probabilities(const Tile &tile, int64_t head, const float *scores, float *mass) {
  constexpr int kVectors = 4, kStep = kVectors * kLanes; // that overlap
  static_assert(kBlockKeys % kStep == 0);
  const float *const shifts = tile.buffers.row_max + head * tile.task.rows;
  const float *const factors = tile.buffers.row_sum + head * tile.task.rows;
  const Block &block = tile.block;
  float sums[kBlockKeys]; // entries from block.padded on are unused
  for (int64_t c = 0; c < block.padded; c += kStep) {
    vfloat sum[kVectors] = {};
    for (int64_t i = 0; i < tile.task.rows; ++i) {
      const float *const row = scores + i * kBlockKeys + c;
      for (int n = 0; n < kVectors; ++n) {
        const vfloat score = load(row + n * kLanes), weight = exponential(score - shifts[i]) * factors[i];
        sum[n] += score == -kInfinity ? splat(0.0f) : weight;
      }
    }
    for (int n = 0; n < kVectors; ++n) store(sums + c + n * kLanes, sum[n]);
  }
  for (int64_t c = 0; c < block.count; ++c)
    if (block.index[c] >= 0) mass[block.index[c]] += sums[c];
}

void key_mass_tile(const fdm_problem &p, const fdm_tensor &lse, const void *plan, const TileTask &task, float *mass,
                   int64_t stride, void *scratch) {
  Tile tile(p, plan, task, false, scratch);
  const TileBuffers &b = tile.buffers;
  tile.for_each({&p.q}, [&] {
    tile.load_rows(p.q, b.q);
    load_factors(tile, lse);
    for (int64_t number = 0; number < tile.block_count(); ++number) {
      tile.load_block(number);
      for (int64_t head = 0; head < tile.task.heads; head += tile.heads_at_once()) {
        const int64_t heads = min64(tile.heads_at_once(), tile.task.heads - head);
        tile.make_scores(head, heads, b.scores, nullptr);
        for (int64_t g = 0; g < heads; ++g)
          add_probabilities(tile, head + g, b.scores + g * tile.task.rows * kBlockKeys, mass + (head + g) * stride);
      }
    }
  });
}

} // namespace
} // namespace fdm::cpu::FDM_SIMD_NAMESPACE
