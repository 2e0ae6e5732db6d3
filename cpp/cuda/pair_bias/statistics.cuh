// SPDX-License-Identifier: BSD-3-Clause
// Row statistics, exponents and dS in the backward kernels of pair biases.
#pragma once

#include "../backward/row_statistics.cuh"
#include "scores.cuh"

namespace fdm::cuda {

__device__ __forceinline__ float &delta_of(const PairBiasBackward &work, int64_t batch, int64_t head, int64_t row) {
  return work.deltas[(batch - work.first_delta) * work.delta_batch + head * work.delta_head + row * work.delta_row];
}

// Loads the statistics of a row, long before they are used. The lse is that of the call, in natural base.
__device__ __forceinline__ RowStatistics fetch_statistics(const PairBiasBackward &work, const Source &source,
                                                          int64_t row) {
  const fdm_problem &p = work.call.p;
  const fdm_tensor &lse = work.a.lse;
  return {static_cast<const float *>(
              lse.data)[head_major_offset(lse, pair_bias_sequence(p, source.batch), row, source.head)],
          delta_of(work, source.batch, source.head, row)};
}
__device__ __forceinline__ RowStatistics to_base_2(const RowStatistics &fetched) {
  return {fabsf(fetched.lse) > kUnusableLse ? INFINITY : fetched.lse * kLog2E, fetched.delta};
}
__device__ __forceinline__ RowStatistics statistics_of(const PairBiasBackward &work, const Source &source,
                                                       int64_t row) {
  return to_base_2(fetch_statistics(work, source, row));
}

// Whether the fused kernel has computed the gradients.
__device__ __forceinline__ bool is_superseded(const PairBiasBackward &work) {
  return work.non_finite && *work.non_finite == 0;
}

__device__ __forceinline__ bool is_large(const RowStatistics &statistics) {
  return !statistics.empty() && fabsf(statistics.lse) > kLargeLse;
}

// Turns scores into base-2 exponents, and sets the gradients to -delta; dO V' is added to them later. Exponents are
// at most 0 except for rounding. `shift` is -lse to base 2.
template <int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void
start_gradients(float (&scores)[kRowTiles][kKeyTiles][4], float (&gradients)[kRowTiles][kKeyTiles][4],
                const float (&shift)[kRowTiles][2], const float (&delta)[kRowTiles][2]) {
  for_accumulators(scores, [&](int m, int n, int i) {
    scores[m][n][i] = fmaf(scores[m][n][i], kLog2E, shift[m][i / 2]);
    gradients[m][n][i] = -delta[m][i / 2];
  });
}

// Drops pairs whose score is -inf, or whose row has a shift(row tile, column tile, element) of -inf: the exponent
// becomes -inf and the gradient 0. Clamps exponents to 0, so that no probability exceeds 1.
template <int kLeftTiles, int kRightTiles, class Shift>
__device__ __forceinline__ void drop_pairs(float (&exponents)[kLeftTiles][kRightTiles][4],
                                           float (&gradients)[kLeftTiles][kRightTiles][4], const Shift &shift) {
  for_accumulators(exponents, [&](int m, int n, int i) {
    float &exponent = exponents[m][n][i];
    const bool dropped = exponent == -INFINITY || shift(m, n, i) == -INFINITY;
    exponent = dropped ? -INFINITY : ptx::min_or_nan(exponent, 0.0f);
    if (dropped) gradients[m][n][i] = 0.0f;
  });
}

// Stores two adjacent elements of a row of dbias, or the first `left` of them.
template <class Element, class Pack = Packing<Element>>
__device__ __forceinline__ void store_pair(const fdm_tensor &t, bool pairs, int64_t offset, float low, float high,
                                           int64_t left, const Pack &pack = {}) {
  if (left <= 0) return;
  if (pairs && left >= 2) {
    if (t.dtype == FDM_FLOAT32)
      *reinterpret_cast<float2 *>(static_cast<float *>(t.data) + offset) = {low, high};
    else
      *reinterpret_cast<uint32_t *>(static_cast<Element *>(t.data) + offset) = pack(low, high);
    return;
  }
  store_element(t, offset, low);
  if (left >= 2) store_element(t, offset + t.stride[3], high);
}

} // namespace fdm::cuda
