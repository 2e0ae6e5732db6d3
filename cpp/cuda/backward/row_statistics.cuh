// SPDX-License-Identifier: BSD-3-Clause
// The statistics of a query row, lse and delta, and the range of rows that keep a key.
#pragma once

#include "../plan/plan.cuh"
#include "../tile/score.cuh"
#include "backward.h"

namespace fdm::cuda {

// If the magnitude of a row's lse exceeds this, rounding makes P = exp(score - lse) exceed 1 by too much. P is then
// cut off at 1.
constexpr float kLargeLse = 65536.0f;

// The tests of each pair of a tile. kept: sets dropped pairs to 0. kept_and_cut: also cuts P off at 1, for rows
// beyond kLargeLse.
enum class PairTests { none, kept, kept_and_cut };

// Beyond this magnitude, rounding has removed log(sum) from lse, and P cannot be recomputed. This happens only if
// every kept key of a row has a bias like finfo.min. Such a row counts as a row that keeps nothing.
constexpr float kUnusableLse = 1e30f;

// The statistics of row i of a head.
__device__ __forceinline__ RowStatistics &row_statistics(const BackwardParams &params, const Sequence &s, int64_t head,
                                                         int64_t i) {
  return params.statistics[(s.batch * params.p.heads + head) * total_rows(params.p) + s.q_begin + i];
}

// The rows of [0, 32) that lie in [first, past), as bits.
__device__ __forceinline__ uint32_t row_bits(int first, int past) {
  const int low = max(0, first), high = min(32, past);
  return low < high ? (~0u >> (32 - (high - low))) << low : 0u;
}

// The rows that may keep a key, the causal limit included. All of them keep it if the mask has no row per query.
__device__ __forceinline__ RowRange rows_of_key(const fdm_problem &p, const Sequence &s, int64_t head, int64_t key) {
  const int64_t begin = is_causal(p) ? max64(0, key - s.causal_off) : 0;
  RowRange rows{static_cast<int32_t>(min64(begin, s.q_count)), static_cast<int32_t>(s.q_count)};
  const fdm_mask_kind kind = mask_kind(p);
  if (kind == FDM_MASK_INTERVALS) {
    const auto load = [&](const fdm_tensor &t) {
      return static_cast<const int32_t *>(
          t.data)[batch_index(t, s) * t.stride[0] + head_index(p, t, head) * t.stride[1] +
                  (s.k_begin + key) * t.stride[3]];
    };
    rows.first = max(rows.first, load(p.start));
    rows.past = max(0, min(rows.past, load(p.end)));
  } else if (kind == FDM_MASK_KEYS) {
    const Matrix mask = score_matrix(p, p.mask, s, head, 1);
    if (!static_cast<const uint8_t *>(mask.base)[key * mask.col]) rows.past = 0;
  }
  return rows;
}

// The words of a tile of a row plan for a query head.
__device__ __forceinline__ TileWords tile_words(const fdm_problem &p, const Plan &plan, const Sequence &s,
                                                int64_t sequence_index, int64_t head, int64_t tile) {
  return tile_words(plan, list_number(p, plan, s, head) * plan.tiles + tile_number(p, s, sequence_index, tile));
}

} // namespace fdm::cuda
