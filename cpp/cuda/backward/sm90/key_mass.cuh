// SPDX-License-Identifier: BSD-3-Clause
// The sum of the probabilities of each key (key mass), with Hopper's wgmma. A thread block has a key block or a part
// of its work, as in ../dkdv.cuh. A step has one product, S' = K Q'. The tensor cores compute it while the scores of
// the previous step become probabilities.
#pragma once

#include "fused_kernel.cuh"
#include "key_stationary.cuh"
#include "ptx/dependent.cuh"

namespace fdm::cuda {

template <class Config> struct MassConsumer : KeyConsumer<Config> {
  using Base = KeyConsumer<Config>;
  using Base::Base;
  using Base::kRows, Base::params, Base::shared, Base::sums;
  using typename Base::Scores;

  PipelineState<Config::kStages> state; // the stage of the last step whose scores were started

  // Waits for the next step and starts its scores. The invalid step that ends the steps also has scores, which are
  // not used.
  __device__ StepFacts start_step(Scores &scores) const {
    Base::Roles::consumer_wait(shared.full[state.index], state.phase);
    const StepFacts facts = shared.stages[state.index].facts.read();
    ptx::warpgroup_arrive();
    this->start_key_product(scores, Base::row_desc(shared.sQ[state.index]));
    return facts;
  }

  __device__ static void finish_scores(Scores &scores) { ptx::warpgroup_wait<0>(scores[0]); }

  // Adds the probabilities of a step whose scores are complete.
  __device__ void add_step(const StepFacts &facts, int stage, Scores &scores) {
    const auto &rows = this->own_rows(stage);
    const auto compute = [&](auto tests, auto softcap, const ScoreFactors &factors) {
      sums.template compute_p<decltype(tests)::value, NoRowBias, decltype(softcap)::value>(
          rows, facts.first_row, facts.buffer, scores, factors);
    };
    constexpr std::integral_constant<PairTests, PairTests::kept_and_cut> kTests;
    constexpr std::integral_constant<Softcap, Softcap::none> kUncapped;
    if (params.p.softcap > 0)
      compute(kTests, std::integral_constant<Softcap, Softcap::applied>{}, ScoreFactors(params.p));
    else if (this->needs_test(facts, facts.first_row, kRows))
      compute(kTests, kUncapped, ScoreFactors::uncapped(params.p));
    else
      compute(std::integral_constant<PairTests, PairTests::none>{}, kUncapped, ScoreFactors::uncapped(params.p));
    sums.add_to_bias_sums(scores);
  }

  // Starts the scores of the next step, and then adds the probabilities of this one. Returns the facts of the next
  // step.
  __device__ StepFacts run_step(const StepFacts &facts, Scores &scores, Scores &next_scores) {
    const int stage = state.index;
    ++state;
    const StepFacts next = start_step(next_scores);
    if (facts.concerned_groups >> Base::Roles::consumer_group() & 1) add_step(facts, stage, scores);
    if (facts.ends_bias_sum) sums.write_bias(facts.head);
    Base::Roles::consumer_release(shared.empty[stage]);
    finish_scores(next_scores);
    return next;
  }

  __device__ void run() {
    sums.start();
    Base::Roles::consumer_wait(shared.keys_full, 0);
    Scores even, odd; // of even and odd steps
    StepFacts facts = start_step(even);
    finish_scores(even);
    while (facts.valid) {
      facts = run_step(facts, even, odd);
      if (!facts.valid) break;
      facts = run_step(facts, odd, even);
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::Roles::kThreads, 1)
    key_mass_kernel_sm90(const __grid_constant__ FusedParams params) {
  auto &shared = dynamic_memory<KeyStationaryShared<Config>>();
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
