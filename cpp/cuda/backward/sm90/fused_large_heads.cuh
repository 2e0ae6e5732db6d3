// SPDX-License-Identifier: BSD-3-Clause
// All gradients in one kernel, as in fused.cuh, for head dimensions whose gradients of 64 keys fill the registers of
// two consumer warpgroups. Each warpgroup has half of the columns of dK, dV and dQ.
//
// Each warpgroup computes P' and dS' of half of a step's rows. They exchange these through shared memory.
#pragma once

#include "fused.cuh"
#include "row_bias_part.cuh"

namespace fdm::cuda {

template <class Config> struct LargeHeadShared : KeyStationaryShared<Config> {
  // A row for each key, a column for each row of the step.
  using Tile = SmemTile<Config::kRows, Config::kKeys>;

  alignas(1024) char sP[Tile::kBytes];
  char sdS[Tile::kBytes];
  float dbias[Config::kKeys];
};

template <class Config> struct LargeHeadConsumer : KeyConsumer<Config> {
  using Base = KeyConsumer<Config>;
  using Shared = LargeHeadShared<Config>;
  using Tile = typename Shared::Tile;
  using Base::kRows, Base::kScoreRows, Base::kHeadDim, Base::sums, Base::sync_consumers;
  using typename Base::Element, typename Base::KeyTile, typename Base::RowTile, typename Base::Scores;
  static constexpr int kColumns = Config::kColumns;

  // The type of row_bias if there is no bias per query.
  struct NoRowBiasPart {
    __device__ NoRowBiasPart(const BackwardParams &, const typename Config::Keys::Shared &) {}
  };
  using RowBias = std::conditional_t<Config::kRowBias, RowBiasPart<Config>, NoRowBiasPart>;

  Shared &shared;
  RowBias row_bias;

  __device__ LargeHeadConsumer(const BackwardParams &parameters, Shared &memory)
      : Base(parameters, memory), shared(memory), row_bias(parameters, memory.keys) {}

  __device__ static int first_column() { return kColumns * Roles::consumer_group(); }
  // Accumulators have this warpgroup's whole panels first. Then comes its half of the panel that both warpgroups
  // share, if there is one.
  static constexpr int kTiles = kColumns / 8, kPanelTiles = kTiles / 8 * 8, kHalfPanelTiles = kTiles - kPanelTiles;
  __device__ static int first_panel_column() { return (kHeadDim - 8 * kPanelTiles) * Roles::consumer_group(); }
  __device__ static int first_half_panel_column() {
    return 8 * (kPanelTiles + kHalfPanelTiles * Roles::consumer_group());
  }
  // Sorts the accumulator tiles by column.
  __device__ static void order_columns(float (&sum)[kTiles][4]) {
    if constexpr (kHalfPanelTiles > 0) {
      if (Roles::consumer_group() == 0) return;
      float ordered[kTiles][4];
      for_accumulators(ordered, [&](int n, int i) { ordered[n][i] = sum[(n + kPanelTiles) % kTiles][i]; });
      for_accumulators(sum, [&](int n, int i) { sum[n][i] = ordered[n][i]; });
    }
  }

  // Starts this warpgroup's columns of sum = left * right, or sum += left * right, summed over 64 keys or rows.
  template <ptx::Major kLeft, class RightTile>
  __device__ static void start_columns(float (&sum)[kTiles][4], const char *left, const char *right, bool accumulate) {
    const uint64_t a = Tile::descriptor(ptx::shared_address(left));
    const uint64_t b = RightTile::descriptor(ptx::shared_address(right));
    const auto multiply = [&](auto &own_sum, int first) {
      warpgroup_gemm_ss_columns<Element, Tile, kLeft, RightTile, 64>(own_sum, a, b + RightTile::offset(0, first),
                                                                     accumulate);
    };
    ptx::warpgroup_arrive();
    multiply(reinterpret_cast<float (&)[kPanelTiles][4]>(sum), first_panel_column());
    if constexpr (kHalfPanelTiles > 0)
      multiply(reinterpret_cast<float (&)[kHalfPanelTiles][4]>(sum[kPanelTiles]), first_half_panel_column());
    ptx::warpgroup_commit_batch();
  }

  // The address of this thread's part of the dQ sums of a step.
  __device__ float *thread_dq_sums(const KeyStep &step) const {
    const KeyTask &task = sums.keys.task();
    const int tile = step.tile / Config::kParts;
    float *rows = query_sums(this->params, task.s, task.sequence_index, sums.keys.head(step), tile * kRows);
    return rows + threadIdx.x / 32 % 4 * (kHeadDim / 8) * 128 + threadIdx.x % 32 * 4;
  }

  __device__ void add_dq(float (&dq)[kTiles][4], float *thread_sums) const {
    ptx::warpgroup_fence_operand(dq);
    float *const panels = thread_sums + first_panel_column() * 16;
    float *const half_panel = thread_sums + first_half_panel_column() * 16;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      ptx::add_global(n < kPanelTiles ? panels + n * 128 : half_panel + (n - kPanelTiles) * 128, dq[n]);
  }

  // Stores P' and dS' of this warpgroup's rows for both warpgroups.
  __device__ void store_p_and_ds(const Scores &scores, const Scores &gradients) const {
    const int key = threadIdx.x / 32 % 4 * 16, row = kScoreRows * Roles::consumer_group();
    uint32_t packed[kScoreRows / 16][4];
    sync_consumers(); // the products that read the previous step's P' and dS' are complete
    pack_left<Element>(packed, scores[0]);
    store_left<Tile>(packed, ptx::shared_address(shared.sP), key, row);
    pack_left<Element>(packed, gradients[0]);
    store_left<Tile>(packed, ptx::shared_address(shared.sdS), key, row);
    ptx::fence_async_proxy();
    sync_consumers();
  }

  // Does the work of compute_p_and_ds() with a bias per query. If `exact`, the products began with zeros, and `added`
  // has the bias. Otherwise the products began with the bias.
  template <class Added>
  __device__ void compute_with_row_bias(const StepFacts &facts, Scores &scores, Scores &gradients, int stage,
                                        bool exact, const Added &added) {
    const auto &rows = this->own_rows(stage);
    const int first = facts.first_row + kScoreRows * Base::own_part();
    const ScoreFactors factors = ScoreFactors::uncapped(this->params.p);
    ptx::warpgroup_wait<1>(scores[0]);
    if (exact)
      sums.template compute_p<PairTests::kept_and_cut>(rows, first, facts.buffer, scores, factors, added);
    else
      sums.template compute_p<PairTests::kept>(rows, first, facts.buffer, scores, factors);
    ptx::warpgroup_wait<0>(gradients[0]);
    sums.template compute_ds<PairTests::kept>(rows, scores, gradients);
  }

  __device__ void run_step(const StepFacts &facts, int stage) {
    Scores scores, gradients;
    if constexpr (Config::kRowBias) {
      const int64_t head = sums.keys.task().first_head + facts.head;
      const int first = facts.first_row + kScoreRows * Base::own_part();
      const bool exact = row_bias.is_exact(facts);
      row_bias.init_scores(scores[0], head, first, exact);
      this->start_scores(scores, gradients, stage);
      compute_with_row_bias(facts, scores, gradients, stage, exact, typename RowBias::Exact{row_bias, head, first});
      row_bias.add_score_gradients(gradients[0], head, first, facts.ends_bias_sum);
    } else {
      this->start_scores(scores, gradients, stage);
      this->compute_p_and_ds(facts, scores, gradients, stage);
    }
    store_p_and_ds(scores, gradients);
    float dq[kTiles][4];
    start_columns<ptx::Major::mn, KeyTile>(dq, shared.sdS, shared.sK, false);
    start_columns<ptx::Major::k, RowTile>(sums.dv[0], shared.sP, shared.sdO[stage], true);
    start_columns<ptx::Major::k, RowTile>(sums.dk[0], shared.sdS, shared.sQ[stage], true);
    ptx::warpgroup_wait<2>();
    add_dq(dq, thread_dq_sums(this->own_rows(stage).step));
    ptx::warpgroup_wait<0>(sums.dv[0], sums.dk[0]);
  }

  // The first warpgroup writes the bias gradient, summed over the rows of both warpgroups.
  __device__ void write_bias() {
    const bool second = Roles::consumer_group() > 0, writes = threadIdx.x % 4 == 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = ptx::row_sum(sums.dbias[0][half]);
      if (second && writes) shared.dbias[sums.key_row(0, half)] = sum;
      sums.dbias[0][half] = writes ? sum : 0.0f;
    }
    sync_consumers();
    if (second) return;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (writes) sums.dbias[0][half] += shared.dbias[sums.key_row(0, half)];
    sums.write_bias(0);
  }

  __device__ void run() {
    Roles::consumer_wait(shared.keys_full, 0);
    if (!uniform(shared.has_key_block)) return;
    if constexpr (Config::kRowBias) this->clear_non_finite_keys();
    sums.start();
    for (PipelineState<Config::kStages> state;; ++state) {
      Roles::consumer_wait(shared.full[state.index], state.phase);
      const StepFacts facts = shared.stages[state.index].facts.read();
      if (!facts.valid) break;
      run_step(facts, state.index);
      Roles::consumer_release(shared.empty[state.index]);
    }
    write_bias();
    order_columns(sums.dk[0]);
    order_columns(sums.dv[0]);
    add_segment_sums<Config>(shared, sums, first_column());
    sums.write(first_column());
  }
};

} // namespace fdm::cuda
