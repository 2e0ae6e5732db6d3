// SPDX-License-Identifier: BSD-3-Clause
// dQ with a pair bias, with mma.sync. row_block.cuh has the mainloop. If an element of the bias has one source, its
// gradient is dS, which this kernel writes.
#pragma once

#include "launch.cuh"
#include "row_block.cuh"
#include "statistics.cuh"

namespace fdm::cuda {

template <class Element, int kHeadDim> using PairBiasDqConfig = RowBlockConfig<Element, kHeadDim, 2, PairBiasBackward>;

template <class Config> struct PairBiasDqBlock : RowBlock<Config> {
  using Base = RowBlock<Config>;
  using Base::exists, Base::factors, Base::problem, Base::shared, Base::work;
  using typename Base::Element, typename Base::Half, typename Base::Scores, typename Base::Tile;
  static constexpr int kHeadDim = Config::kHeadDim, kRowTiles = Config::kRowTiles;

  float dq[kRowTiles][kHeadDim / 8][4];
  float shift[kRowTiles][2], delta[kRowTiles][2]; // -lse to base 2, and delta
  bool large = false;

  using Base::Base;

  __device__ void start() {
    this->load_rows(0, problem().q);
    this->load_rows(1, work.a.dout);
    clear(dq);
    for_pairs<kRowTiles>([&](int m, int half) {
      RowStatistics statistics{INFINITY, 0.0f};
      if (exists(m, half)) statistics = statistics_of(work, this->source(), this->row(m, half));
      shift[m][half] = -statistics.lse;
      delta[m][half] = statistics.delta;
      large |= is_large(statistics);
    });
    large = __any_sync(0xffffffffu, large);
  }

  __device__ void add(int block, const Half &half, bool exact) {
    const uint32_t keys = this->keys_at(block);
    Scores scores, gradients;
    clear(scores);
    const uint32_t right = Tile::fragment_address(Tile::right_rows(keys), half.key, 0);
    gemm_ss<Element, kHeadDim>(scores, this->warp_rows_at(0), right);
    this->finish_scores(scores, block, half, exact);
    start_gradients(scores, gradients, shift, delta);
    gemm_ss<Element, kHeadDim>(gradients, this->warp_rows_at(1),
                               Tile::fragment_address(Tile::right_rows(this->values_at(block)), half.key, 0));
    uint32_t live = 0;
    if (exact || large) {
      drop_pairs(scores, gradients, [&](int m, int, int i) { return shift[m][i / 2]; });
      live = live_columns(scores, -INFINITY, [&](int m, int part) { return exists(m, part); });
    }
    for_accumulators(gradients,
                     [&](int m, int n, int i) { gradients[m][n][i] *= ptx::exp2_approximate(scores[m][n][i]); });
    if (work.writes_dbias) write_dbias(gradients, block * kPairBiasKeys + half.key_of_block);
    if (factors.cap > 0) {
      clear(scores);
      gemm_ss<Element, kHeadDim>(scores, this->warp_rows_at(0), right);
      multiply_slopes(gradients, scores, factors);
    }
    const uint32_t columns = Tile::fragment_address(Tile::right_columns(keys), half.key, 0);
    if (exact || large)
      gemm_rs_live<Element, kHeadDim>(dq, gradients, columns, live);
    else
      gemm_rs<Element, kHeadDim>(dq, gradients, columns);
  }

  // Writes dS of half a key block, or zeros, to dbias.
  __device__ void write_dbias(const Scores &gradients, int first_key) const {
    const fdm_tensor &t = work.a.dbias;
    const Source &source = this->source();
    const Sequence s = pair_bias_sequence(problem(), source.batch);
    const int64_t head = batch_index(t, s) * t.stride[0] + head_index(problem(), t, source.head) * t.stride[1];
    for_pairs<kRowTiles>([&](int m, int half) {
      if (!exists(m, half)) return;
      const int64_t offset = head + this->row(m, half) * t.stride[2];
#pragma unroll
      for (int n = 0; n < kSubTiles; ++n) {
        const int key = first_key + 8 * n + accumulator_column();
        store_pair<Element>(t, work.dbias_pairs, offset + key * t.stride[3], gradients[m][n][2 * half],
                            gradients[m][n][2 * half + 1], problem().keys - key);
      }
    });
  }

  __device__ void run(const RowBlockTask &task, bool exact) {
    const auto skip = [&](int block, const Half &half) {
      if (work.writes_dbias) clear_dbias(block * kPairBiasKeys + half.key_of_block);
    };
    Base::run(
        task.begin, task.end, [&] { start(); }, [] {}, [&](int block, const Half &half) { add(block, half, exact); },
        skip);
  }
  // Zeroes dbias for the keys from a block on, which no row of the tile sees.
  __device__ void clear_dbias_from(int block) const {
    if (!work.writes_dbias) return;
#pragma unroll 1
    for (int64_t key = int64_t(block) * kPairBiasKeys; key < problem().keys; key += kSubKeys) clear_dbias(int(key));
  }
  __device__ void clear_dbias(int first_key) const {
    Scores zeros;
    clear(zeros);
    write_dbias(zeros, first_key);
  }

  __device__ bool needs_exact() const {
    return has_nan(dq, [&](int m, int half) { return exists(m, half); });
  }

  __device__ void write() const {
    const fdm_tensor &t = work.a.dq;
    if (!present(t)) return;
    const Source &source = this->source();
    const Sequence s = pair_bias_sequence(problem(), source.batch);
    for_pairs<kRowTiles>([&](int m, int half) {
      write_row(static_cast<Element *>(t.data) + row_offset(t, s, this->row(m, half), source.head), t.stride[3],
                int(problem().head_dim), dq[m], half, problem().scale, exists(m, half));
    });
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    pair_bias_dq_kernel(const __grid_constant__ PairBiasBackward work) {
  if (is_superseded(work)) return;
  extern __shared__ __align__(1024) char dynamic_shared[];
  __shared__ RowBlockShared<Config> shared;
  const RowBlockTask task = row_block_task<Config>(work, 1);
  set_slots<Config>(shared, work, task, &work.a.dout);
  __syncthreads();
  PairBiasDqBlock<Config> block(work, shared, dynamic_shared, task.first_row);
  bool exact = false;
  do block.run(task, exact);
  while (!exact && (exact = __syncthreads_or(block.needs_exact())));
  block.write();
  block.clear_dbias_from(task.end);
}

template <class Element, int kHeadDim>
cudaError_t launch_pair_bias_dq(const PairBiasBackward &work, cudaStream_t stream) {
  using Config = PairBiasDqConfig<Element, kHeadDim>;
  return launch_pair_bias<pair_bias_dq_kernel<Config>>(work, planes_of(work.call.p) * work.groups * work.tiles,
                                                       Config::kThreads, Config::sizes(work).shared_bytes(), stream);
}

} // namespace fdm::cuda
