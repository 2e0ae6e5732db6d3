// SPDX-License-Identifier: BSD-3-Clause
// The gradients of keys, values and of a bias per key, with Hopper's wgmma. A thread block has a key block or a part
// of its work, as in ../dkdv.cuh.
//
// While one consumer warpgroup computes P' and dS', the products of the other keep the tensor cores busy.
#pragma once

#include <type_traits>

#include "key_stationary.cuh"
#include "ptx/dependent.cuh"

namespace fdm::cuda {

// K and V stay in shared memory: in registers, ptxas 13.0 overwrites them while the loop still needs them.
template <class Config> struct DkdvConsumer : KeyConsumer<Config> {
  using Base = KeyConsumer<Config>;
  using Base::Base;
  using Base::kRows, Base::params, Base::shared, Base::sums;
  using typename Base::Element, typename Base::Scores;

  __device__ void start_sum_of(float (&sum)[Config::kHeadDim / 8][4], const Scores &left, const char *tile) {
    uint32_t packed[kRows / 16][4];
    pack_left<Element>(packed, left[0]);
    Base::start_sum(sum, packed, tile);
  }

  // A warpgroup does not overlap its products with its own elementwise work. That takes more registers than there
  // are, and is slower.
  __device__ void run_step(const StepFacts &facts, int stage) {
    Scores scores, gradients;
    this->start_scores(scores, gradients, stage);
    this->template compute_p_and_ds<BiasSums::always>(facts, scores, gradients, stage);
    start_sum_of(sums.dv[0], scores, shared.sdO[stage]);
    start_sum_of(sums.dk[0], gradients, shared.sQ[stage]);
    ptx::warpgroup_wait<0>(sums.dv[0], sums.dk[0]);
  }

  __device__ void run() {
    sums.start();
    Roles::consumer_wait(shared.keys_full, 0);
    for (PipelineState<Config::kStages> state;; ++state) {
      Roles::consumer_wait(shared.full[state.index], state.phase);
      const StepFacts facts = shared.stages[state.index].facts.read();
      if (!facts.valid) break;
      if (facts.concerned_groups >> Roles::consumer_group() & 1) run_step(facts, state.index);
      if (params.bias_heads > 1 && facts.ends_bias_sum) sums.write_bias(facts.head);
      Roles::consumer_release(shared.empty[state.index]);
    }
    if (params.bias_heads == 1) sums.write_bias(0);
    sums.write();
  }
};

template <class Config> __device__ void run_item(const BackwardParams &params) {
  auto &shared = dynamic_memory<KeyStationaryShared<Config>>();
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  // The producers get the registers that their pointers need, from those that the accumulators leave.
  using Registers = std::conditional_t<Config::kHeadDim <= 96, RoleRegisters<200, 104>, RoleRegisters<224, 56>>;
  if (Roles::is_producer()) {
    Registers::produce();
    const KeyItem item = key_item(params.keys, int32_t(blockIdx.x));
    RowProducer<Config>(params, shared).run(item, key_block_place(params, item.block));
  } else {
    Registers::consume();
    DkdvConsumer<Config>(params, shared).run();
  }
}

template <class Config>
__global__ void __launch_bounds__(Roles::kThreads, 1) dkdv_kernel_sm90(const __grid_constant__ BackwardParams params) {
  // All inputs are complete before dq lets this kernel start. So its thread blocks may start while dq still runs.
  if (!params.follows_dq) ptx::wait_for_kernel_ahead();
  if (has_key_item(params, blockIdx.x)) run_item<Config>(params);
  if (params.follows_dq && blockIdx.x == 0) ptx::wait_for_kernel_ahead();
}

} // namespace fdm::cuda
