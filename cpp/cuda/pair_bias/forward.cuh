// SPDX-License-Identifier: BSD-3-Clause
// Forward pass with a pair bias, with mma.sync. row_block.cuh has the mainloop. Splits divide the keys over several
// thread blocks.
#pragma once

#include "launch.cuh"
#include "ptx/dependent.cuh"
#include "row_block.cuh"
#include "softmax.cuh"

namespace fdm::cuda {

template <class Element, int kHeadDim>
struct PairBiasForwardConfig : RowBlockConfig<Element, kHeadDim, 1, PairBiasForward> {
  static constexpr bool kHoldsQ = kHeadDim <= 32; // in registers
};

template <class Config> struct PairBiasForwardBlock : RowBlock<Config> {
  using Base = RowBlock<Config>;
  using Base::exists, Base::problem, Base::shared, Base::work;
  using typename Base::Element, typename Base::Half, typename Base::Scores, typename Base::Tile;
  static constexpr int kHeadDim = Config::kHeadDim, kRowTiles = Config::kRowTiles;

  LeftOperand<Element, kHeadDim, kRowTiles, Config::kHoldsQ> queries;
  float out[kRowTiles][kHeadDim / 8][4];
  PairBiasSoftmax<kRowTiles, kSubTiles> softmax;

  using Base::Base;

  __device__ void start() {
    this->load_rows(0, problem().q);
    queries.left = this->warp_rows_at(0);
    softmax.start();
    clear(out);
  }

  __device__ void add(int block, const Half &half, bool exact) {
    Scores scores;
    clear(scores);
    queries.multiply(scores, Tile::fragment_address(Tile::right_rows(this->keys_at(block)), half.key, 0));
    this->finish_scores(scores, block, half, exact);
    uint32_t live = 0;
    if (exact) live = live_columns(scores, -INFINITY, [&](int m, int part) { return exists(m, part); });
    softmax.apply(scores, out, exact);
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
    softmax.finish();
  }

  // Whether a result needs an exact run.
  __device__ bool needs_exact() const {
    const auto there = [&](int m, int half) { return exists(m, half); };
    return has_nan(out, there) || softmax.needs_exact(there);
  }

  // The epilogue writes normalized rows and their lse. A split writes unnormalized rows, with their maximum and sum
  // to base 2.
  __device__ void write(int split) const {
    for_pairs<kRowTiles>([&](int m, int half) {
      const bool there = exists(m, half);
      const int64_t i = this->row(m, half);
      const float sum = softmax.sum[m][half], shift = softmax.shift[m][half];
      if (work.splits == 1)
        write_pair_bias_row<Element>(work, this->source(), i, there, out[m], half, sum, shift);
      else if (there)
        write_partial_row(work, this->source(), i, split, out[m], half, sum, shift);
    });
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    pair_bias_forward_kernel(const __grid_constant__ PairBiasForward work) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  __shared__ RowBlockShared<Config> shared;
  ptx::start_dependents();
  const RowBlockTask task = row_block_task<Config>(work, work.splits);
  set_slots<Config>(shared, work, task, nullptr);
  __syncthreads();
  PairBiasForwardBlock<Config> block(work, shared, dynamic_shared, task.first_row);
  bool exact = false;
  do block.run(task, exact);
  while (!exact && (exact = __syncthreads_or(block.needs_exact())));
  block.write(task.split);
}

template <class Element, int kHeadDim>
cudaError_t launch_pair_bias_forward(const PairBiasForwardLaunch &launch, cudaStream_t stream) {
  using Config = PairBiasForwardConfig<Element, kHeadDim>;
  return launch_pair_bias<pair_bias_forward_kernel<Config>>(launch.work, launch.route.blocks, Config::kThreads,
                                                            Config::sizes(launch.work).shared_bytes(), stream);
}

} // namespace fdm::cuda
