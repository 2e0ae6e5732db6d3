// SPDX-License-Identifier: BSD-3-Clause
// Forward pass of queries that list their keys, with mma.sync. See list_tile.cuh.
//
// Where few heads share a list, each warp has columns of its own, and its own sums of all rows, which are merged at the
// end. Where many do, each warp has rows of its own.
#pragma once

#include "../forward/running_rows.cuh"
#include "../tile/sink.cuh"
#include "list_tile.cuh"

namespace fdm::cuda {

template <class Config> struct ListForwardShared : ListShared<Config> {
  // The pitch of a row of results in shared memory, in the place of keys. With it, the writes of a warp meet all banks.
  static constexpr int kPitch = Config::kHeadDim + 8;
  static constexpr bool kMerges = Config::kKeyWarps > 1;
  static_assert(!kMerges || Config::kKeyWarps * Config::kRows * kPitch * int(sizeof(float)) <=
                                Config::kStages * 2 * Config::kKeyBytes);
  static constexpr int kMergedRows = kMerges ? Config::kRows : 1;
  float maximum[Config::kKeyWarps][kMergedRows], sum[Config::kKeyWarps][kMergedRows];

  __device__ float *results(int warp, int row) {
    return reinterpret_cast<float *>(this->sKV) + (warp * Config::kRows + row) * kPitch;
  }
};

template <class Config> struct ListForward : ListTile<Config> {
  using Base = ListTile<Config>;
  using Shared = ListForwardShared<Config>;
  using Base::params, Base::task;
  using Element = typename Config::Element;
  using Tile = typename Config::Tile;

  Shared &smem;
  RunningRows<typename Config::Element, Config::kRowTiles, Base::kColumnTiles, Config::kHeadDim / 8> rows;

  __device__ ListForward(const ListParams &parameters, Shared &memory) : Base(parameters, memory), smem(memory) {}

  __device__ void run() {
    this->load_rows(params.p.q, smem.sQ, params.aligned);
    ptx::cp_async_fence();
    rows.start();
    this->for_steps([&](int step) {
      if (!this->has_rows_of_warp()) return;
#pragma unroll 1
      for (int first = 0; first < Config::kWarpColumns; first += Config::kPartColumns) attend(step, first);
    });
    rows.finish_sums();
    if constexpr (Shared::kMerges) {
      store_results();
      __syncthreads();
      write_merged();
    } else {
      write();
    }
  }

  __device__ void attend(int step, int first) {
    this->multiply(rows.scores, smem.sQ, step, 0, first);
    const auto ignore = [](int, int, int, float) {};
    if (params.p.softcap > 0)
      this->template finish_scores<true>(rows.scores, step, first, ignore);
    else
      this->template finish_scores<false>(rows.scores, step, first, ignore);
    rows.softmax();
    gemm_rs<Element, Config::kHeadDim>(rows.out, rows.scores,
                                       Tile::right_columns(this->columns_of_warp(step, 1, first)));
  }

  __device__ Element *out_row(int r) const {
    return static_cast<Element *>(params.forward.out.data) + this->row_place(params.forward.out, r);
  }
  __device__ void write_lse(int r, float maximum, float sum) const {
    const fdm_tensor &t = params.forward.lse;
    static_cast<float *>(t.data)[head_major_offset(t, task.s, task.query, task.head + r)] =
        sum == 0.0f ? -INFINITY : (maximum + ptx::log2_approximate(sum)) * (1.0f / kLog2E);
  }

  __device__ void write() const {
#pragma unroll
    for (int m = 0; m < Config::kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = this->row(m, half);
        const bool exists = r < task.heads;
        const float maximum = rows.maximum[m][half], sum = rows.sum[m][half];
        const float factor = exists ? row_normalizer(sink_score(params.p, task.head + r), maximum, sum) : 0.0f;
        write_row(exists ? out_row(r) : nullptr, params.forward.out.stride[3], int(params.p.head_dim), rows.out[m],
                  half, factor, exists, sum == 0.0f);
        if (exists && threadIdx.x % 4 == 0) write_lse(r, maximum, sum);
      }
  }

  __device__ void store_results() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = this->row(0, half);
      float *to = smem.results(this->key_warp(), r) + accumulator_column();
#pragma unroll
      for (int d = 0; d < Config::kHeadDim / 8; ++d)
        *reinterpret_cast<float2 *>(to + 8 * d) = make_float2(rows.out[0][d][2 * half], rows.out[0][d][2 * half + 1]);
      if (threadIdx.x % 4 == 0) {
        smem.maximum[this->key_warp()][r] = rows.maximum[0][half];
        smem.sum[this->key_warp()][r] = rows.sum[0][half];
      }
    }
  }

  // Sums over the warps, in their order.
  __device__ void write_merged() const {
    const int head_dim = int(params.p.head_dim);
    for (int i = threadIdx.x; i < task.heads * Config::kHeadDim; i += Config::kThreads) {
      const int r = i / Config::kHeadDim, d = i % Config::kHeadDim;
      float maximum = -INFINITY, sum = 0.0f, value = 0.0f;
#pragma unroll
      for (int w = 0; w < Config::kKeyWarps; ++w) maximum = fmaxf(maximum, smem.maximum[w][r]);
      const float shift = maximum == -INFINITY ? 0.0f : maximum;
#pragma unroll
      for (int w = 0; w < Config::kKeyWarps; ++w) {
        const float factor = ptx::exp2_approximate(smem.maximum[w][r] - shift);
        sum += smem.sum[w][r] * factor;
        value += smem.results(w, r)[d] * factor;
      }
      if (d < head_dim)
        store_element(params.forward.out, this->row_place(params.forward.out, r) + d * params.forward.out.stride[3],
                      sum == 0.0f ? 0.0f : value * row_normalizer(sink_score(params.p, task.head + r), maximum, sum));
      if (d == 0) write_lse(r, maximum, sum);
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 2) list_forward_kernel(const __grid_constant__ ListParams params) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto &shared = *reinterpret_cast<ListForwardShared<Config> *>(dynamic_shared);
  if (threadIdx.x == 0) shared.task.set(params.p, params.tiles, blockIdx.x);
  __syncthreads();
  ListForward<Config>(params, shared).run();
}

} // namespace fdm::cuda
