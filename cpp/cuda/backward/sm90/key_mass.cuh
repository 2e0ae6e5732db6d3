// SPDX-License-Identifier: BSD-3-Clause
// The sums of the probabilities of each key, with Hopper's wgmma: one thread block for a key block or a part of its
// work, as ../dkdv.cuh tells. There is one product for each step, that of keys and queries.
#pragma once

#include "fused_kernel.cuh"
#include "key_stationary.cuh"
#include "ptx/dependent.cuh"

namespace fdm::cuda {

template <class Config> struct MassConsumer : KeyConsumer<Config> {
  using Base = KeyConsumer<Config>;
  using Base::Base;
  using Base::kRows, Base::kHeadDim, Base::k_desc, Base::params, Base::shared, Base::sums;
  using typename Base::Element, typename Base::KeyTile, typename Base::RowTile, typename Base::Scores;

  __device__ void run_step(const StepFacts &facts, int number) {
    Scores scores;
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss<Element, KeyTile, RowTile, kHeadDim>(scores[0], k_desc, Base::row_desc(shared.sQ[number]), false);
    ptx::warpgroup_commit_batch();
    const auto &rows = this->own_rows(number);
    if (params.p.softcap > 0) {
      Scores nothing; // dP', from which P comes by a delta of -1
      clear(nothing);
      ptx::warpgroup_wait<0>();
      ptx::warpgroup_fence_operand(scores[0]);
      sums.template make<true>(rows, facts.any_tests(), scores, nothing);
    } else {
      const bool test = this->needs_test(facts, facts.first, kRows);
      const ScoreFactors factors = ScoreFactors::uncapped(params.p);
      ptx::warpgroup_wait<0>();
      ptx::warpgroup_fence_operand(scores[0]);
      if (test)
        sums.template make_probabilities<PairTests::kept_and_cut>(rows, facts.first, facts.buffer, scores, factors);
      else
        sums.template make_probabilities<PairTests::none>(rows, facts.first, facts.buffer, scores, factors);
      sums.add_probabilities(scores);
    }
  }

  __device__ void run() {
    sums.start();
    Base::Roles::consumer_wait(shared.keys_full, 0);
    for (PipelineState<Config::kStages> state;; ++state) {
      Base::Roles::consumer_wait(shared.full[state.index], state.phase);
      const StepFacts facts = shared.stages[state.index].facts.read();
      if (!facts.valid) break;
      if (facts.concerns >> Base::Roles::consumer_group() & 1) run_step(facts, state.index);
      if (facts.ends) sums.write_bias(facts.head);
      Base::Roles::consumer_release(shared.empty[state.index]);
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::Roles::kThreads, 1)
    key_mass_kernel_sm90(const __grid_constant__ FusedParams params) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto &shared = *reinterpret_cast<KeyStationaryShared<Config> *>(dynamic_shared);
  ptx::wait_for_kernel_ahead();
  if (!has_key_item(params, blockIdx.x)) return;
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  using Registers = RoleRegisters<200, 104>;
  if (Config::Roles::is_producer()) {
    Registers::produce();
    const KeyItem item = key_item(params.keys, int32_t(blockIdx.x));
    RowProducer<Config>(params, shared, &params.maps).run(item, key_block_place(params, item.block));
  } else {
    Registers::consume();
    MassConsumer<Config>(params, shared).run();
  }
}

} // namespace fdm::cuda
