// SPDX-License-Identifier: BSD-3-Clause
// Forward pass of dense blocks, with mma.sync. row_block.cuh has the mainloop; the keys may be divided over several blocks
// of threads (splits).
#pragma once

#include "../backward/row_statistics.cuh"
#include "row_block.cuh"

namespace fdm::cuda {

template <class Element, int kHeadDim> struct DenseForwardConfig : RowBlockConfig<Element, kHeadDim, 1, DenseForward> {
  static constexpr bool kHoldsQ = kHeadDim <= 32; // in registers
};

template <class Config> struct DenseForwardBlock : RowBlock<Config> {
  using Base = RowBlock<Config>;
  using Base::exists, Base::problem, Base::shared, Base::work;
  using typename Base::Element, typename Base::Half, typename Base::Scores, typename Base::Tile;
  static constexpr int kHeadDim = Config::kHeadDim, kRowTiles = Config::kRowTiles;
  static constexpr float kSlack = 5.5f; // of the running maximum: probabilities of up to 2^8 do no harm

  LeftOperand<Element, kHeadDim, kRowTiles, Config::kHoldsQ> queries;
  float out[kRowTiles][kHeadDim / 8][4];
  float maximum[kRowTiles][2], shift[kRowTiles][2], sum[kRowTiles][2]; // shift: shift_of(maximum)

  using Base::Base;

  __device__ void start() {
    this->load_rows(0, problem().q, work.call.aligned);
    queries.left = this->warp_rows_at(0);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        maximum[m][half] = -INFINITY;
        shift[m][half] = sum[m][half] = 0.0f;
      }
    clear(out);
  }

  // What the scores of a row are shifted by, to base 2. Next to the lowest float that is beyond the range.
  __device__ static float shift_of(float largest) {
    return largest == -INFINITY ? 0.0f : fminf(fmaxf(largest * -kLog2E, -3.4e38f), 3.4e38f);
  }

  // The largest score of this thread's part of a row.
  __device__ static float largest_of(const Scores &scores, int m, int half) {
    float largest = scores[m][0][2 * half];
#pragma unroll
    for (int n = 0; n < kSubTiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) largest = fmaxf(largest, scores[m][n][2 * half + i]);
    return largest;
  }

  // Lets the maxima of the rows follow their scores, and scales what was summed before.
  __device__ void raise_maxima(const Scores &scores) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float before = maximum[m][half], largest = fmaxf(before, ptx::row_max(largest_of(scores, m, half)));
        const float factor = before == -INFINITY ? 0.0f : ptx::exp2_approximate((before - largest) * kLog2E);
        maximum[m][half] = largest;
        shift[m][half] = shift_of(largest);
        sum[m][half] *= factor;
#pragma unroll
        for (int d = 0; d < kHeadDim / 8; ++d) {
          out[m][d][2 * half] *= factor;
          out[m][d][2 * half + 1] *= factor;
        }
      }
  }

  // Turns scores into probabilities, relative to the running maximum of their row. That follows only where a row of the
  // warp falls behind by kSlack, so most blocks need no exchange between threads. Beside a large maximum the product with
  // log2 e rounds by more than probabilities may differ, so `exact` subtracts first there. All other rows give the same
  // bits as without it: what a dropped key holds must not show.
  __device__ void softmax(Scores &scores, bool exact) {
    bool behind = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) behind |= largest_of(scores, m, half) > maximum[m][half] + kSlack;
    if (__any_sync(0xffffffffu, behind)) raise_maxima(scores);
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
        for (int n = 0; n < kSubTiles; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float &score = scores[m][n][2 * half + i];
            score = exponential(score, m, half);
            added += score;
          }
        sum[m][half] += added;
      }
  }

  __device__ void add(int block, const Half &half, bool exact) {
    Scores scores;
    clear(scores);
    queries.multiply(scores, Tile::fragment_address(Tile::right_rows(this->keys_at(block)), half.key, 0));
    this->finish_scores(scores, block, half, exact);
    uint32_t live = 0;
    if (exact) live = live_columns(scores, -INFINITY, [&](int m, int part) { return exists(m, part); });
    softmax(scores, exact);
    const uint32_t right = Tile::fragment_address(Tile::right_columns(this->values_at(block)), half.key, 0);
    if (exact)
      gemm_rs_live<Element, kHeadDim>(out, scores, right, live);
    else
      gemm_rs<Element, kHeadDim>(out, scores, right);
  }

  __device__ void run(const RowBlockTask &task, bool exact) {
    Base::run(
        task.begin, task.end, [&] { start(); }, [&] { queries.load(); },
        [&](int block, const Half &half) { add(block, half, exact); }, [](int, const Half &) {});
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) sum[m][half] = ptx::row_sum(sum[m][half]);
  }

  __device__ bool has_large_maximum(int m, int half) const {
    return maximum[m][half] != -INFINITY && fabsf(maximum[m][half]) > kLargeLse;
  }

  // Does a result show what only an exact run can compute?
  __device__ bool is_odd() const {
    bool odd = has_nan(out, [&](int m, int half) { return exists(m, half); });
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        odd |= exists(m, half) && (isnan(sum[m][half]) || has_large_maximum(m, half));
    return odd;
  }

  // The epilogue writes normalized rows and their lse; or, of a split, rows that are not normalized, with their maximum
  // and sum to base 2.
  __device__ void write(int split) const {
    const fdm_tensor &t = work.a.out, &lse = work.a.lse;
    const int head_dim = int(problem().head_dim);
    const int64_t batch = this->source().batch, head = this->source().head;
    const Sequence s = dense_sequence(problem(), batch);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!exists(m, half)) continue;
        const int64_t i = this->row(m, half);
        const float total = sum[m][half];
        if (work.splits == 1) {
          const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
          write_row(static_cast<Element *>(t.data) + row_offset(t, s, i, head), t.stride[3], head_dim, out[m], half,
                    inverse);
          if (threadIdx.x % 4 == 0)
            static_cast<float *>(lse.data)[lse_offset(lse, s, i, head)] =
                total == 0.0f ? -INFINITY : (log2f(total) - shift[m][half]) / kLog2E;
          continue;
        }
        const int64_t partial_row =
            ((split * problem().batch + batch) * problem().heads + head) * problem().queries + i;
#pragma unroll
        for (int d = 0; d < kHeadDim / 8; ++d)
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const int column = 8 * d + accumulator_column() + k;
            if (column < head_dim) work.partial_out[partial_row * head_dim + column] = out[m][d][2 * half + k];
          }
        if (threadIdx.x % 4 == 0) {
          work.partial_max[partial_row] = total == 0.0f ? -INFINITY : -shift[m][half];
          work.partial_sum[partial_row] = total;
        }
      }
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    dense_forward_kernel(const __grid_constant__ DenseForward work) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  __shared__ RowBlockShared<Config> shared;
  const RowBlockTask task = row_block_task<Config>(work, work.splits);
  set_slots<Config>(shared, work, task, nullptr);
  __syncthreads();
  DenseForwardBlock<Config> block(work, shared, dynamic_shared, task.first_row);
  bool exact = false;
  do block.run(task, exact);
  while (!exact && (exact = __syncthreads_or(block.is_odd())));
  block.write(task.split);
}

} // namespace fdm::cuda
