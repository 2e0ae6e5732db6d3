// SPDX-License-Identifier: BSD-3-Clause
// The online softmax of a warp's rows for natural-base scores (scores.cuh), and the epilogue that writes a row.
#pragma once

#include "../backward/row_statistics.cuh"
#include "scores.cuh"

namespace fdm::cuda {

template <int kRowTiles, int kSubTileCount> struct PairBiasSoftmax {
  static constexpr float kSlack = 5.5f; // of the running maximum: probabilities of up to e^5.5 < 2^8 do no harm
  using Scores = float[kRowTiles][kSubTileCount][4];

  float maximum[kRowTiles][2], shift[kRowTiles][2], sum[kRowTiles][2]; // shift: shift_of(maximum)

  __device__ void start() {
    for_pairs<kRowTiles>([&](int m, int half) {
      maximum[m][half] = -INFINITY;
      shift[m][half] = sum[m][half] = 0.0f;
    });
  }

  // The shift of a row's scores to base 2, -largest * log2 e. Clamped, since the product may exceed the float32
  // range.
  __device__ static float shift_of(float largest) {
    return largest == -INFINITY ? 0.0f : fminf(fmaxf(largest * -kLog2E, -3.4e38f), 3.4e38f);
  }

  // The factor that rescales sums from `maximum` to the new maximum `largest`.
  __device__ static float factor_of(float maximum, float largest) {
    return maximum == -INFINITY ? 0.0f : ptx::exp2_approximate((maximum - largest) * kLog2E);
  }

  // The largest score in this thread's part of a row.
  __device__ static float largest_of(const Scores &scores, int m, int half) {
    float largest = scores[m][0][2 * half];
    for_pairs<kSubTileCount>([&](int n, int i) { largest = fmaxf(largest, scores[m][n][2 * half + i]); });
    return largest;
  }

  // Raises the running maxima to the scores of the rows, and rescales the sums and the output accumulators.
  template <int kOutTiles> __device__ void raise_maxima(const Scores &scores, float (&out)[kRowTiles][kOutTiles][4]) {
    for_pairs<kRowTiles>([&](int m, int half) {
      const float before = maximum[m][half], largest = fmaxf(before, ptx::row_max(largest_of(scores, m, half)));
      const float factor = factor_of(before, largest);
      maximum[m][half] = largest;
      shift[m][half] = shift_of(largest);
      sum[m][half] *= factor;
#pragma unroll
      for (int d = 0; d < kOutTiles; ++d) {
        out[m][d][2 * half] *= factor;
        out[m][d][2 * half + 1] *= factor;
      }
    });
  }

  // Turns scores into probabilities relative to the running maximum of their row. The maximum rises only if a row of
  // the warp exceeds it by kSlack, so most blocks need no exchange between threads. With a large maximum, the product
  // with log2 e rounds by more than the tolerance of probabilities, so `exact` subtracts first in such rows. All
  // other rows give the same bits as without `exact`: the content of a dropped key must not change results.
  template <int kOutTiles> __device__ void apply(Scores &scores, float (&out)[kRowTiles][kOutTiles][4], bool exact) {
    bool behind = false;
    for_pairs<kRowTiles>([&](int m, int half) { behind |= largest_of(scores, m, half) > maximum[m][half] + kSlack; });
    if (__any_sync(0xffffffffu, behind)) raise_maxima(scores, out);
    if (exact)
      exponentiate(scores, [&](float score, int m, int half) {
        if (has_large_maximum(m, half)) return ptx::exp2_approximate((score - maximum[m][half]) * kLog2E);
        return ptx::exp2_approximate(fmaf(score, kLog2E, shift[m][half]));
      });
    else
      exponentiate(scores, [&](float score, int m, int half) {
        return ptx::exp2_approximate(fmaf(score, kLog2E, shift[m][half]));
      });
  }

  // Replaces scores by exponential(score, m, half), and adds the results to the sums of the rows.
  template <class Exponential> __device__ void exponentiate(Scores &scores, const Exponential &exponential) {
    for_pairs<kRowTiles>([&](int m, int half) {
      float added = 0.0f;
      for_pairs<kSubTileCount>([&](int n, int i) {
        float &score = scores[m][n][2 * half + i];
        score = exponential(score, m, half);
        added += score;
      });
      sum[m][half] += added;
    });
  }

  // Reduces the sums of the rows over the threads of a row.
  __device__ void finish() {
    for_pairs<kRowTiles>([&](int m, int half) { sum[m][half] = ptx::row_sum(sum[m][half]); });
  }

  __device__ bool has_large_maximum(int m, int half) const {
    return (maximum[m][half] != -INFINITY) & (fabsf(maximum[m][half]) > kLargeLse);
  }

  // Whether an existing row (exists(m, half)) needs an exact run: its sum is NaN, or its maximum is large.
  template <class Exists> __device__ bool needs_exact(const Exists &exists) const {
    bool exact = false;
    for_pairs<kRowTiles>(
        [&](int m, int half) { exact |= exists(m, half) & (isnan(sum[m][half]) | has_large_maximum(m, half)); });
    return exact;
  }
};

// Writes row i of a source, normalized, and its lse, if the row exists. `half`: the half of the accumulators with the
// row. `sum` and `shift` are from its softmax. All lanes of the warp call this.
template <class Element, int kOutTiles>
__device__ __forceinline__ void write_pair_bias_row(const PairBiasForward &work, const Source &source, int64_t i,
                                                    bool exists, const float (&out)[kOutTiles][4], int half, float sum,
                                                    float shift) {
  const fdm_tensor &t = work.a.out, &lse = work.a.lse;
  const Sequence s = pair_bias_sequence(work.call.p, source.batch);
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  write_row(static_cast<Element *>(t.data) + row_offset(t, s, i, source.head), t.stride[3], int(work.call.p.head_dim),
            out, half, inverse, exists, sum == 0.0f);
  if (exists && threadIdx.x % 4 == 0)
    static_cast<float *>(lse.data)[head_major_offset(lse, s, i, source.head)] =
        sum == 0.0f ? -INFINITY : (log2f(sum) - shift) / kLog2E;
}

// Writes row i of a source for a split: unnormalized, with its maximum and sum to base 2.
template <int kOutTiles>
__device__ __forceinline__ void write_partial_row(const PairBiasForward &work, const Source &source, int64_t i,
                                                  int split, const float (&out)[kOutTiles][4], int half, float sum,
                                                  float shift) {
  const fdm_problem &p = work.call.p;
  const int head_dim = int(p.head_dim);
  const int64_t row = ((split * p.batch + source.batch) * p.heads + source.head) * p.queries + i;
  const bool even = head_dim % 2 == 0;
#pragma unroll
  for (int d = 0; d < kOutTiles; ++d) {
    const int column = 8 * d + accumulator_column();
    float *const to = work.partials.out + row * head_dim + column;
    const float first = out[d][2 * half], second = out[d][2 * half + 1];
    if (even && column < head_dim) {
      *reinterpret_cast<float2 *>(to) = {first, second};
      continue;
    }
    if (column < head_dim) to[0] = first;
    if (column + 1 < head_dim) to[1] = second;
  }
  if (threadIdx.x % 4 != 0) return;
  work.partials.max[row] = sum == 0.0f ? -INFINITY : -shift;
  work.partials.sum[row] = sum;
}

} // namespace fdm::cuda
