// SPDX-License-Identifier: BSD-3-Clause
// The elementwise work of dq on a row tile: dS from the scores and dP, and the epilogue. mma.sync and wgmma have the
// same accumulator layout. A warp has kRowTiles tiles of 16 rows.
#pragma once

#include "../tile/products.cuh"
#include "../tile/row_bias_tile.cuh"
#include "row_statistics.cuh"

namespace fdm::cuda {

struct DqTask {
  Sequence s;
  int64_t sequence_index, head, kv_head;
  int64_t first_row;
  TileColumns columns;
  ScoreView bias;
};

template <class Element, int kRowTileCount, int kColumnTileCount, int kHeadDim, TileKind kKind> struct DqRows {
  static constexpr bool kGeneral = kKind == TileKind::general;
  static constexpr int kRowTiles = kRowTileCount, kColumnTiles = kColumnTileCount;

  const BackwardParams &params;
  const DqTask &task;
  bool cuts_probabilities; // since there are rows beyond kLargeLse
  float lse[kRowTiles][2], delta[kRowTiles][2];
  float scores[kRowTiles][kColumnTiles][4], gradients[kRowTiles][kColumnTiles][4];
  float dq[kRowTiles][kHeadDim / 8][4];

  __device__ DqRows(const BackwardParams &parameters, const DqTask &own_task) : params(parameters), task(own_task) {}

  __device__ static int row(int m, int half) {
    return threadIdx.x / 32 * (16 * kRowTiles) + 16 * m + accumulator_row(half);
  }
  __device__ bool exists(int r) const { return task.first_row + r < task.s.q_count; }
  __device__ RowStatistics statistics(int r) const {
    return exists(r) ? row_statistics(params, task.s, task.head, task.first_row + r) : RowStatistics{INFINITY, 0.0f};
  }

  // Stores the statistics of a row in registers. Returns whether the row is beyond kLargeLse.
  __device__ bool set_statistics(int m, int half, const RowStatistics &loaded) {
    lse[m][half] = loaded.lse;
    delta[m][half] = loaded.delta;
    return !loaded.empty() && fabsf(loaded.lse) > kLargeLse;
  }

  // Replaces the scores by dS. The gradients hold dP. If `partial`, some pairs may not be kept. See RowBiasReader for
  // row_bias.
  template <bool kHasSoftcap, PairTests kPairTests, class Slot, class RowBias>
  __device__ void compute_ds(const Slot &slot, bool partial, const RowBias &row_bias) {
    const ScoreFactors factors(params.p);
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      const int column = 8 * n + accumulator_column();
      const float2 bias = *reinterpret_cast<const float2 *>(&slot.bias[column]);
      uint2 shifts{};
      if constexpr (kGeneral) shifts = row_bias.shifts(column);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float2 added{};
          if constexpr (kGeneral) added = row_bias.elements(m, half, column, shifts);
          // The row in the plan's tile, which several thread blocks may share.
          const int r = int(task.first_row - task.columns.first_row) + row(m, half);
          uint2 word{~0u, ~0u};
          if (kPairTests != PairTests::none && partial) {
            word = *reinterpret_cast<const uint2 *>(&slot.word[r / 32][column]);
            word.x >>= r % 32;
            word.y >>= r % 32;
          }
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float &s = scores[m][n][2 * half + i];
            float slope, x = factors.score<kHasSoftcap>(s, i ? bias.y : bias.x, &slope);
            bool kept = (i ? word.y : word.x) & 1;
            if constexpr (kGeneral) {
              const float b = i ? added.y : added.x;
              kept = kept && b != -INFINITY;
              x = with_row_bias(x, b);
            }
            x -= lse[m][half];
            if constexpr (kPairTests != PairTests::none) x = ptx::min_or_nan(x, 0.0f);
            s = ptx::exp2_approximate(x) * (gradients[m][n][2 * half + i] - delta[m][half]) * slope;
            if constexpr (kPairTests != PairTests::none) s = kept ? s : 0.0f;
          }
        }
    }
  }

  // If `partial`, some pairs may not be kept.
  template <class Slot, class RowBias>
  __device__ void compute_ds(const Slot &slot, bool partial, const RowBias &row_bias) {
    const bool cap = params.p.softcap > 0;
    if (kGeneral || cuts_probabilities || partial) {
      if (cap) return compute_ds<true, PairTests::kept_and_cut>(slot, partial, row_bias);
      return compute_ds<false, PairTests::kept_and_cut>(slot, partial, row_bias);
    }
    if constexpr (!kGeneral) {
      if (cap) return compute_ds<true, PairTests::none>(slot, partial, row_bias);
      compute_ds<false, PairTests::none>(slot, partial, row_bias);
    }
  }
  template <class Slot> __device__ void compute_ds(const Slot &slot, bool partial) {
    static_assert(!kGeneral);
    compute_ds(slot, partial, nullptr);
  }

  // The epilogue writes the rows of dQ.
  __device__ void write() const {
    const fdm_tensor &t = params.a.dq;
    for_pairs<kRowTiles>([&](int m, int half) {
      const int r = row(m, half);
      write_row(static_cast<Element *>(t.data) + row_offset(t, task.s, task.first_row + r, task.head), t.stride[3],
                int(params.p.head_dim), dq[m], half, params.p.scale, exists(r));
    });
  }
};

} // namespace fdm::cuda
