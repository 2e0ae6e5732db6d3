// SPDX-License-Identifier: BSD-3-Clause
// Forward pass of queries that list their keys, with mma.sync. See list_tile.cuh.
//
// A warp has 16 or 32 rows of a tile. Warps with the same rows have different columns. Each keeps its own sums, which
// are merged after the last step.
#pragma once

#include "../forward/running_rows.cuh"
#include "../tile/sink.cuh"
#include "list_tile.cuh"

namespace fdm::cuda {

template <class Config> struct ListForwardShared : ListShared<Config> {
  // The sums that a warp hands to another one with the same rows, in place of K and V. Each thread stores, for each
  // tile of 16 rows, a float4 of maxima and sums, and a float4 for each 8 columns of accumulators.
  static constexpr int kWarpParts = Config::kRowTiles * (Config::kHeadDim / 8 + 1);
  static_assert(Config::kKeyWarps / 2 * Config::kRowWarps * kWarpParts * 32 * int(sizeof(float4)) <=
                Config::kStages * 2 * Config::kKeyBytes);

  __device__ float4 &part(int warp, int number) {
    return reinterpret_cast<float4 *>(this->sKV)[(warp * kWarpParts + number) * 32 + threadIdx.x % 32];
  }
};

template <class Config> struct ListForward : ListTile<Config> {
  using Base = ListTile<Config>;
  using Shared = ListForwardShared<Config>;
  using Base::params, Base::task;
  using Element = typename Config::Element;
  using Tile = typename Config::Tile;

  // Q stays in registers where a warp has 32 rows and the scores of 16 columns.
  static constexpr bool kHoldsQuery = Config::kRowTiles == 2 && Config::kPartColumns == 16;

  Shared &smem;
  LeftOperand<Element, Config::kHeadDim, Config::kRowTiles, kHoldsQuery> query;
  RunningRows<typename Config::Element, Config::kRowTiles, Base::kColumnTiles, Config::kHeadDim / 8> rows;

  __device__ ListForward(const ListParams &parameters, Shared &memory) : Base(parameters, memory), smem(memory) {}

  __device__ void run() {
    const fdm_tensor &q = params.p.q;
    copy_any_rows<Tile, Config::kRows, Config::kThreads>(
        ptx::shared_address(smem.sQ), params.aligned, int(params.p.head_dim), q, [&](int r) -> const uint16_t * {
          return r < task.heads ? static_cast<const uint16_t *>(q.data) + this->row_place(q, r) : kZeroRow;
        });
    ptx::cp_async_fence();
    rows.start();
    query.left = Tile::left(ptx::shared_address(smem.sQ), this->row_warp() * (16 * Config::kRowTiles));
    if constexpr (kHoldsQuery) {
      ptx::cp_async_wait<0>();
      __syncthreads();
      query.load();
    }
    this->for_steps([&](int step) {
      if (!this->has_rows_of_warp()) return;
#pragma unroll 1
      for (int first = 0; first < Config::kWarpColumns; first += Config::kPartColumns) attend(step, first);
    });
    rows.finish_sums();
    merge();
    if (this->key_warp() == 0) write();
  }

  __device__ void attend(int step, int first) {
    clear(rows.scores);
    query.multiply(rows.scores, Tile::right_rows(this->columns_of_warp(step, 0, first)));
    const auto ignore = [](int, int, int, float) {};
    if (params.p.softcap > 0)
      this->template finish_scores<true>(rows.scores, step, first, ignore);
    else
      this->template finish_scores<false>(rows.scores, step, first, ignore);
    rows.softmax();
    gemm_rs<Element, Config::kHeadDim>(rows.out, rows.scores,
                                       Tile::right_columns(this->columns_of_warp(step, 1, first)));
  }

  __device__ void write_lse(int r, float maximum, float sum) const {
    const fdm_tensor &t = params.forward.lse;
    static_cast<float *>(t.data)[head_major_offset(t, task.s, task.query, task.head + r)] =
        sum == 0.0f ? -INFINITY : (maximum + ptx::log2_approximate(sum)) * (1.0f / kLog2E);
  }

  __device__ void write() const {
    for_pairs<Config::kRowTiles>([&](int m, int half) {
      const int r = this->row(m, half);
      const bool exists = r < task.heads;
      const float maximum = rows.maximum[m][half], sum = rows.sum[m][half];
      const float factor = exists ? row_normalizer(sink_score(params.p, task.head + r), maximum, sum) : 0.0f;
      const int64_t place = exists ? this->row_place(params.forward.out, r) : 0;
      write_row(static_cast<Element *>(params.forward.out.data) + place, params.forward.out.stride[3],
                int(params.p.head_dim), rows.out[m], half, factor, exists, sum == 0.0f);
      if (exists && present(params.forward.out_rest)) write_rests(place, rows.out[m], half, factor, sum == 0.0f);
      if (exists && threadIdx.x % 4 == 0) write_lse(r, maximum, sum);
    });
  }

  // Writes this thread's rests of a row of out.
  __device__ void write_rests(int64_t place, const float (&sums)[Config::kHeadDim / 8][4], int half, float factor,
                              bool blank) const {
    const fdm_tensor &t = params.forward.out_rest;
    auto *row = static_cast<uint8_t *>(t.data) + place;
    const auto value = [&](int d, int i) { return blank ? 0.0f : sums[d][2 * half + i] * factor; };
#pragma unroll
    for (int d = 0; d < Config::kHeadDim / 8; ++d) {
      const int column = 8 * d + accumulator_column();
      const uint32_t rests = pack_rests<Element>(value(d, 0), value(d, 1));
      if (column < params.p.head_dim) row[column * t.stride[3]] = uint8_t(rests);
      if (column + 1 < params.p.head_dim) row[(column + 1) * t.stride[3]] = uint8_t(rests >> 16);
    }
  }

  // Adds the sums of warps with the same rows to those of the first one. In each round, the upper half of the remaining
  // warps hand theirs to the lower half.
  __device__ void merge() {
    static_assert((Config::kKeyWarps & (Config::kKeyWarps - 1)) == 0);
#pragma unroll
    for (int kept = Config::kKeyWarps / 2; kept > 0; kept /= 2) {
      const int upper = this->key_warp() - kept;
      if (upper >= 0 && upper < kept) store_rows(upper * Config::kRowWarps + this->row_warp());
      __syncthreads();
      if (upper < 0) add_rows(this->warp());
      __syncthreads();
    }
  }
  __device__ void store_rows(int to) {
#pragma unroll
    for (int m = 0; m < Config::kRowTiles; ++m) {
      const int first = m * (Config::kHeadDim / 8 + 1);
      smem.part(to, first) = {rows.maximum[m][0], rows.maximum[m][1], rows.sum[m][0], rows.sum[m][1]};
#pragma unroll
      for (int d = 0; d < Config::kHeadDim / 8; ++d) {
        const float (&out)[4] = rows.out[m][d];
        smem.part(to, first + 1 + d) = {out[0], out[1], out[2], out[3]};
      }
    }
  }
  __device__ void add_rows(int from) {
#pragma unroll
    for (int m = 0; m < Config::kRowTiles; ++m) {
      const int first = m * (Config::kHeadDim / 8 + 1);
      const float4 other = smem.part(from, first);
      float factor[2], other_factor[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float own_maximum = rows.maximum[m][half], other_maximum = half ? other.y : other.x;
        const float maximum = fmaxf(own_maximum, other_maximum), shift = maximum == -INFINITY ? 0.0f : maximum;
        factor[half] = ptx::exp2_approximate(own_maximum - shift);
        other_factor[half] = ptx::exp2_approximate(other_maximum - shift);
        rows.maximum[m][half] = maximum;
        rows.sum[m][half] = rows.sum[m][half] * factor[half] + (half ? other.w : other.z) * other_factor[half];
      }
#pragma unroll
      for (int d = 0; d < Config::kHeadDim / 8; ++d) {
        const float4 added = smem.part(from, first + 1 + d);
        const float terms[4] = {added.x, added.y, added.z, added.w};
        float (&out)[4] = rows.out[m][d];
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] = out[i] * factor[i / 2] + terms[i] * other_factor[i / 2];
      }
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 2) list_forward_kernel(const __grid_constant__ ListParams params) {
  auto &shared = dynamic_memory<ListForwardShared<Config>>();
  if (threadIdx.x == 0) shared.task.set(params.p, params.tiles, blockIdx.x);
  __syncthreads();
  ListForward<Config>(params, shared).run();
}

} // namespace fdm::cuda
