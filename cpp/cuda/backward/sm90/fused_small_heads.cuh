// SPDX-License-Identifier: BSD-3-Clause
// All gradients in one kernel, as in fused.cuh, for head dimensions up to 64. Three consumer warpgroups have 64 keys
// each. So each warp scheduler has three of their warps to choose from, and a row of dQ takes one addition to global
// memory for 192 keys.
//
// The warpgroups take turns: one of them computes dQ of a whole step. It does so a step later, when the others have
// usually stored their dS.
#pragma once

#include "../query_sums.cuh"
#include "key_stationary.cuh"
#include "ptx/dependent.cuh"
#include "segment_sums.cuh"

namespace fdm::cuda {

// dS' of the last steps, one for each warpgroup, which computes its dQ. dS' has a row for each key and a column for
// each row of the step.
template <class Config> struct SmallHeadShared : KeyStationaryShared<Config> {
  using Roles = typename Config::Roles;
  static constexpr int kSteps = Roles::kConsumerGroups;
  using Tile = SmemTile<Config::kRows, Config::kKeys>;

  alignas(1024) char sdS[kSteps][Tile::kBytes];
  uint64_t ds_full[kSteps], ds_empty[kSteps];

  // One thread of the block calls this, before the others use the barriers.
  __device__ void init() {
    KeyStationaryShared<Config>::init();
    for (int step = 0; step < kSteps; ++step) {
      ptx::init_barrier(ds_full[step], Roles::kConsumerThreads);
      ptx::init_barrier(ds_empty[step], 128); // the warpgroup that computes dQ
    }
  }
};

template <class Config> struct SmallHeadConsumer : KeyConsumer<Config> {
  using Base = KeyConsumer<Config>;
  using Shared = SmallHeadShared<Config>;
  using Tile = typename Shared::Tile;
  using Base::kRows, Base::kScoreRows, Base::kHeadDim, Base::sums;
  using typename Base::Element, typename Base::KeyTile, typename Base::RowTile, typename Base::Roles,
      typename Base::Scores;
  static constexpr int kGroups = Roles::kConsumerGroups, kParts = Config::kParts;
  static_assert(kRows == 64 && kHeadDim <= 64);

  Shared &shared;
  PipelineState<Shared::kSteps> state; // the stage of this step's dS'
  int32_t previous_row = -1; // the first row of the previous step, counted over the heads of the group; -1: none

  __device__ SmallHeadConsumer(const BackwardParams &parameters, Shared &memory)
      : Base(parameters, memory), shared(memory) {}

  // If it is this warpgroup's turn, computes dQ of the previous step and adds it to the sums.
  __device__ void finish_previous() const {
    const int previous_stage = state.index == 0 ? kGroups - 1 : state.index - 1;
    if (previous_row < 0 || previous_stage != Roles::consumer_group()) return;
    Roles::consumer_wait(shared.ds_full[previous_stage], state.index == 0 ? state.phase ^ 1 : state.phase);
    const uint64_t ds = Tile::descriptor(ptx::shared_address(shared.sdS[previous_stage])),
                   k = KeyTile::descriptor(ptx::shared_address(shared.sK));
    float *thread_sums = thread_dq_sums(), dq[kHeadDim / 8][4];
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss_columns<Element, Tile, ptx::Major::mn, KeyTile, Config::kKeys>(dq, ds, k, false);
    ptx::warpgroup_commit_batch();
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_fence_operand(dq);
    ptx::arrive(shared.ds_empty[previous_stage]);
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) ptx::add_global(thread_sums + n * 128, dq[n]);
  }

  // P' and dS' of all rows of a step, as left operands.
  struct Results {
    uint32_t p[kParts][kScoreRows / 16][4], ds[kParts][kScoreRows / 16][4];
  };

  // Packs the results of a part of the rows, and stores its dS' for the warpgroup that computes dQ.
  __device__ void store_results(Results &results, int part, const Scores &p, const Scores &ds) const {
    pack_left<Element>(results.ds[part], ds[0]);
    pack_left<Element>(results.p[part], p[0]);
    if (part == 0) Roles::producer_acquire(shared.ds_empty[state.index], state.phase);
    store_left<Tile>(results.ds[part], ptx::shared_address(shared.sdS[state.index]), threadIdx.x / 32 * 16,
                     kScoreRows * part);
  }

  // With a softcap, the parts are computed one after the other, since the slope of each score needs a register.
  __device__ void compute_in_turn(const StepFacts &facts, int stage, Results &results) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Scores scores, gradients;
      this->start_scores(scores, gradients, stage, part);
      this->compute_p_and_ds(facts, scores, gradients, stage, part);
      store_results(results, part, scores, gradients);
    }
  }

  // Without a softcap, one product computes S' of all rows. The parts of dP' use the same registers one after the
  // other.
  __device__ void compute_together(const StepFacts &facts, int stage, Results &results) {
    Scores scores[kParts], gradients;
    auto &all_scores = reinterpret_cast<float (&)[kRows / 8][4]>(scores);
    const uint64_t dout = Base::row_desc(shared.sdO[stage]);
    const auto start_gradients = [&](int part) {
      ptx::warpgroup_arrive();
      warpgroup_gemm_ss<Element, KeyTile, RowTile, kHeadDim>(gradients[0], this->v_desc,
                                                             dout + RowTile::offset(kScoreRows, 0) * part, false);
      ptx::warpgroup_commit_batch();
    };
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss<Element, KeyTile, RowTile, kHeadDim>(all_scores, this->k_desc, Base::row_desc(shared.sQ[stage]),
                                                           false);
    ptx::warpgroup_commit_batch();
    start_gradients(0);
    const bool test = this->needs_test(facts, facts.first_row, kRows);
    const ScoreFactors factors = ScoreFactors::uncapped(this->params.p);
    ptx::warpgroup_wait<1>();
    ptx::warpgroup_fence_operand(all_scores);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const auto &rows = this->own_rows(stage, part);
      const int first = facts.first_row + kScoreRows * part;
      if (test)
        sums.template compute_p<PairTests::kept_and_cut>(rows, first, facts.buffer, scores[part], factors);
      else
        sums.template compute_p<PairTests::none>(rows, first, facts.buffer, scores[part], factors);
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const auto &rows = this->own_rows(stage, part);
      ptx::warpgroup_wait<0>();
      ptx::warpgroup_fence_operand(gradients[0]);
      if (test)
        sums.template compute_ds<PairTests::kept>(rows, scores[part], gradients);
      else
        sums.template compute_ds<PairTests::none>(rows, scores[part], gradients);
      store_results(results, part, scores[part], gradients);
      if (part + 1 < kParts) start_gradients(part + 1);
    }
  }

  // The products of a step that concerns this warpgroup's keys.
  __device__ void run_step(const StepFacts &facts, int stage) {
    Results results;
    if constexpr (Config::kSoftcap)
      compute_in_turn(facts, stage, results);
    else
      compute_together(facts, stage, results);
    ptx::fence_async_proxy();
    ptx::arrive(shared.ds_full[state.index]);
    auto &p = reinterpret_cast<uint32_t (&)[kRows / 16][4]>(results.p);
    auto &ds = reinterpret_cast<uint32_t (&)[kRows / 16][4]>(results.ds);
    Base::start_sum(sums.dv[0], p, shared.sdO[stage]);
    Base::start_sum(sums.dk[0], ds, shared.sQ[stage]);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_fence_operand(sums.dv[0]);
    ptx::warpgroup_fence_operand(sums.dk[0]);
    ptx::warpgroup_fence_operand(p);
    ptx::warpgroup_fence_operand(ds);
  }

  // A step that concerns only keys of other warpgroups: stores dS' = 0 for this warpgroup's keys.
  __device__ void store_zero_ds() {
    const uint32_t zeros[kRows / 16][4] = {};
    Roles::producer_acquire(shared.ds_empty[state.index], state.phase);
    store_left<Tile>(zeros, ptx::shared_address(shared.sdS[state.index]), threadIdx.x / 32 * 16, 0);
    ptx::fence_async_proxy();
    ptx::arrive(shared.ds_full[state.index]);
  }

  // The address of this thread's part of the dQ sums of the previous step.
  __device__ float *thread_dq_sums() const {
    const KeyTask &task = sums.keys.task();
    float *rows = query_sums(this->params, task.s, task.sequence_index, task.first_head, 0);
    return rows + int64_t(previous_row) * kHeadDim + threadIdx.x / 32 % 4 * (kHeadDim / 8) * 128 + threadIdx.x % 32 * 4;
  }

  __device__ void run() {
    Roles::consumer_wait(shared.keys_full, 0);
    if (!uniform(shared.has_key_block)) return;
    if constexpr (Config::kHasRowPlans) this->clear_non_finite_keys();
    sums.start();
    const int group = Roles::consumer_group();
    for (PipelineState<Config::kStages> stage;; ++stage) {
      Roles::consumer_wait(shared.full[stage.index], stage.phase);
      const StepFacts facts = shared.stages[stage.index].facts.read();
      if (!facts.valid) break;
      if (facts.concerned_groups) {
        if (facts.concerned_groups >> group & 1)
          run_step(facts, stage.index);
        else
          store_zero_ds();
      }
      Roles::consumer_release(shared.empty[stage.index]);
      if (facts.concerned_groups == 0) continue;
      finish_previous();
      previous_row = int32_t(facts.head * this->params.query_sums.head_rows) + facts.first_row;
      ++state;
    }
    finish_previous();
    sums.write_bias(0);
    if constexpr (Config::Keys::kSegments) add_segment_sums<Config>(shared, sums);
    sums.write();
  }
};

} // namespace fdm::cuda
