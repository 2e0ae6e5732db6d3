// SPDX-License-Identifier: BSD-3-Clause
// The running softmax of the rows of a warp, for natural scores (scores.cuh), and how a row of results is written.
#pragma once

#include "../backward/row_statistics.cuh"
#include "scores.cuh"

namespace fdm::cuda {

template <int kRowTiles, int kSubTileCount> struct PairBiasSoftmax {
  static constexpr float kSlack = 5.5f; // of the running maximum: probabilities of up to 2^8 do no harm
  using Scores = float[kRowTiles][kSubTileCount][4];

  float maximum[kRowTiles][2], shift[kRowTiles][2], sum[kRowTiles][2]; // shift: shift_of(maximum)

  __device__ void start() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        maximum[m][half] = -INFINITY;
        shift[m][half] = sum[m][half] = 0.0f;
      }
  }

  // What the scores of a row are shifted by, to base 2. Next to the lowest float that is beyond the range.
  __device__ static float shift_of(float largest) {
    return largest == -INFINITY ? 0.0f : fminf(fmaxf(largest * -kLog2E, -3.4e38f), 3.4e38f);
  }

  // What makes sums relative to a maximum ones relative to a larger one.
  __device__ static float factor_of(float maximum, float largest) {
    return maximum == -INFINITY ? 0.0f : ptx::exp2_approximate((maximum - largest) * kLog2E);
  }

  // The largest score of this thread's part of a row.
  __device__ static float largest_of(const Scores &scores, int m, int half) {
    float largest = scores[m][0][2 * half];
#pragma unroll
    for (int n = 0; n < kSubTileCount; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) largest = fmaxf(largest, scores[m][n][2 * half + i]);
    return largest;
  }

  // Lets the maxima of the rows follow their scores, and scales what was summed before.
  template <int kOutTiles> __device__ void raise_maxima(const Scores &scores, float (&out)[kRowTiles][kOutTiles][4]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
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
      }
  }

  // Turns scores into probabilities, relative to the running maximum of their row. That follows only where a row of the
  // warp falls behind by kSlack, so most blocks need no exchange between threads. Beside a large maximum the product
  // with log2 e rounds by more than probabilities may differ, so `exact` subtracts first there. All other rows give the
  // same bits as without it: what a dropped key holds must not show.
  template <int kOutTiles> __device__ void apply(Scores &scores, float (&out)[kRowTiles][kOutTiles][4], bool exact) {
    bool behind = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) behind |= largest_of(scores, m, half) > maximum[m][half] + kSlack;
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

  // Replaces scores by exponential(score, m, half), and adds these to the sums of the rows.
  template <class Exponential> __device__ void exponentiate(Scores &scores, const Exponential &exponential) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float added = 0.0f;
#pragma unroll
        for (int n = 0; n < kSubTileCount; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float &score = scores[m][n][2 * half + i];
            score = exponential(score, m, half);
            added += score;
          }
        sum[m][half] += added;
      }
  }

  // Makes the sums of this thread's columns those of whole rows.
  __device__ void finish() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) sum[m][half] = ptx::row_sum(sum[m][half]);
  }

  __device__ bool has_large_maximum(int m, int half) const {
    return (maximum[m][half] != -INFINITY) & (fabsf(maximum[m][half]) > kLargeLse);
  }

  // Whether a row for which exists(m, half) shows that an exact run is needed.
  template <class Exists> __device__ bool needs_exact(const Exists &exists) const {
    bool exact = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        exact |= exists(m, half) & (isnan(sum[m][half]) | has_large_maximum(m, half));
    return exact;
  }
};

// Writes row i of a source, normalized, and its lse, if it exists. `half` is that of the row, `sum` and `shift` are
// those of its softmax. All lanes of the warp call this.
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
    static_cast<float *>(lse.data)[lse_offset(lse, s, i, source.head)] =
        sum == 0.0f ? -INFINITY : (log2f(sum) - shift) / kLog2E;
}

// Writes row i of a source for a split: not normalized, with its maximum and sum to base 2.
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
