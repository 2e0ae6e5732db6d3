// SPDX-License-Identifier: BSD-3-Clause
// The running softmax of the rows of a warp, and its sums. The accumulator layouts of mma.sync and wgmma are the
// same.
#pragma once

#include "../tile/products.cuh"

namespace fdm::cuda {

template <class Element, int kRowTiles, int kColumnTiles, int kDimTiles> struct RunningRows {
  static constexpr float kSlack = 8.0f;
  // The distance above the scores at which an updated maximum is set. If scores rise with the key, the maximum then
  // changes once in several blocks, not in each. Probabilities in float16 have too small an exponent range for this;
  // those in bfloat16 do not.
  static constexpr float kHeadroom = std::is_same_v<Element, __half> ? 0.0f : 48.0f;

  float scores[kRowTiles][kColumnTiles][4];
  float out[kRowTiles][kDimTiles][4];
  float maximum[kRowTiles][2], sum[kRowTiles][2];

  __device__ void start() {
    start_sums();
    clear(out);
  }
  __device__ void start_sums() {
    for_pairs<kRowTiles>([&](int m, int half) {
      maximum[m][half] = -INFINITY;
      sum[m][half] = 0.0f;
    });
  }

  // Turns the scores of a row into probabilities relative to its running maximum. Returns the factor that rescales
  // earlier sums. The maximum changes only if it falls behind by kSlack: probabilities of up to 2^kSlack are
  // harmless, and most blocks then leave the accumulators unchanged. `scale` > 0 converts the scores to base 2.
  __device__ float softmax(int m, int half, float scale = 1.0f) {
    float largest = -INFINITY;
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n)
      largest = fmaxf(largest, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
    largest = fmaxf(maximum[m][half], ptx::row_max(largest) * scale);
    if (largest <= maximum[m][half] + kSlack)
      largest = maximum[m][half];
    else if (maximum[m][half] != -INFINITY)
      largest += kHeadroom;
    const float shift = largest == -INFINITY ? 0.0f : largest;
    const float factor = ptx::exp2_approximate(maximum[m][half] - shift);
    maximum[m][half] = largest;
    float added = 0.0f;
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float &s = scores[m][n][2 * half + i];
        s = ptx::exp2_approximate(fmaf(s, scale, -shift));
        added += s;
      }
    sum[m][half] = sum[m][half] * factor + added;
    return factor;
  }

  __device__ void rescale(int m, int half, float factor) {
    if (__any_sync(0xffffffffu, factor != 1.0f)) {
#pragma unroll
      for (int d = 0; d < kDimTiles; ++d) {
        out[m][d][2 * half] *= factor;
        out[m][d][2 * half + 1] *= factor;
      }
    }
  }

  // The softmax of all rows. A single test for all rows lets the compiler overlap their latencies.
  __device__ void softmax(float scale = 1.0f) {
    float factor[kRowTiles][2];
    bool changed = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        factor[m][half] = softmax(m, half, scale);
        changed |= factor[m][half] != 1.0f;
      }
    if (!__any_sync(0xffffffffu, changed)) return;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int d = 0; d < kDimTiles; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[m][d][i] *= factor[m][i / 2];
  }

  // Sums over the threads of a row. Returns whether a sum of this thread is NaN.
  __device__ bool finish_sums() {
    bool any_nan = false;
    for_pairs<kRowTiles>([&](int m, int half) {
      sum[m][half] = ptx::row_sum(sum[m][half]);
      any_nan |= isnan(sum[m][half]);
    });
    return any_nan;
  }
};

} // namespace fdm::cuda
