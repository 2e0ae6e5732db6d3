// SPDX-License-Identifier: BSD-3-Clause
// All gradients in one kernel with Hopper's wgmma, for head dimensions up to 128, and for 192 with narrow values. It
// computes five products for each key block and row tile. Separate kernels for dQ and for dK and dV compute seven. A
// thread block has a key block or a part of its work, as in ../dkdv.cuh.
//
// dQ of a row tile is a sum over all key blocks. Each adds its part to float32 sums in global memory, in no fixed
// order, as FlashAttention-3 does. The keys of a block belong to two consumer warpgroups, which exchange dS' through
// shared memory. Each warpgroup computes half of a step's dQ one step later. So one warpgroup may be half a step
// ahead, and its products keep the tensor cores busy while the other computes P' and dS'.
#pragma once

#include <type_traits>

#include "../query_sums.cuh"
#include "key_stationary.cuh"
#include "ptx/dependent.cuh"
#include "segment_sums.cuh"

namespace fdm::cuda {

// dS' of the steps: a row for each key, a column for each row of the step.
template <class Config> struct FusedShared : KeyStationaryShared<Config> {
  static constexpr int kStages = 2;
  using Tile = SmemTile<Config::kRows, Config::kKeys>;

  alignas(1024) char sdS[kStages][Tile::kBytes];
  // The low halves of P' in float32. Its high halves are in the memory of dS' meanwhile
  // (FusedConsumer::run_large_step).
  static constexpr bool kHasLowHalves = Config::kHeadDim > 128 && __is_same(typename Config::Element, __half);
  alignas(128) char low_halves[kHasLowHalves ? Tile::kBytes : 16];
  uint64_t ds_full[kStages], ds_empty[kStages];

  // One thread of the block calls this, before the others use the barriers.
  __device__ void init() {
    KeyStationaryShared<Config>::init();
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::init_barrier(ds_full[stage], Roles::kConsumerThreads);
      ptx::init_barrier(ds_empty[stage], Roles::kConsumerThreads);
    }
  }
};

// Up to 64 columns, the gradients leave room for K and V in registers.
template <class Config>
constexpr KeyOperands kFusedKeyOperands =
    Config::kHeadDim <= 64 && !Config::kSoftcap ? KeyOperands::registers : KeyOperands::shared;

template <class Config> struct FusedConsumer : KeyConsumer<Config, kFusedKeyOperands<Config>> {
  using Base = KeyConsumer<Config, kFusedKeyOperands<Config>>;
  using Shared = FusedShared<Config>;
  using Base::kRows, Base::kHeadDim, Base::sums;
  using Base::kScoreRows;
  using typename Base::Element, typename Base::KeyTile, typename Base::ValueTile, typename Base::DoutTile,
      typename Base::Scores;
  // A warpgroup computes dQ of a panel of 64 columns. Above 128 columns it also computes half of the middle panel. Up
  // to 64 columns (kSmall) it computes all columns of half of the step's 128 rows.
  static constexpr bool kSmall = kHeadDim <= 64, kLarge = kHeadDim > 128;
  static constexpr int kTiles = kSmall ? kHeadDim / 8 : 8, kHalfPanelTiles = 4;
  static constexpr int kPanelDistance = kSmall ? 0 : kLarge ? kHeadDim - 64 : 64;
  static constexpr int kParts = Config::kParts;
  static_assert(kRows == (kSmall ? 128 : 64) && (kHeadDim <= 128 || (kHeadDim == 192 && Config::kValueDim <= 128)));

  // The facts about a step that are needed until its dQ is computed.
  struct Step {
    float *dq;                     // this thread's part of the sums
    uint32_t concerned_groups = 0; // bit n: the step concerns the keys of warpgroup n; 0 before the first step
  };

  Shared &shared;
  uint32_t ds_steps = 0; // the number of steps whose dS' this warpgroup has handed over
  float *dq_sums;        // this thread's part of the sums of the first row of the first head of the group
  Step previous{};

  __device__ FusedConsumer(const BackwardParams &parameters, Shared &memory)
      : Base(parameters, memory), shared(memory) {}

  __device__ static uint32_t ds_stage(uint32_t step) { return step % Shared::kStages; }
  __device__ static uint32_t ds_phase(uint32_t step) { return step / Shared::kStages % 2; }

  // The number of this warpgroup's tiles of 8 columns of dQ, without those of the middle panel.
  __device__ static int own_tiles() {
    if (kHeadDim == 96) return Roles::consumer_group() ? 4 : 8;
    return kTiles;
  }

  // Waits for dS' of the previous step.
  __device__ void wait_for_ds() const {
    if (previous.concerned_groups) Roles::consumer_wait(shared.ds_full[ds_stage(ds_steps - 1)], ds_phase(ds_steps - 1));
  }
  // The columns of K from which this warpgroup's columns of dQ are computed.
  __device__ uint64_t panel() const {
    return KeyTile::descriptor(ptx::shared_address(shared.sK)) +
           KeyTile::offset(0, kPanelDistance) * Roles::consumer_group();
  }
  __device__ uint64_t half_panel() const {
    return KeyTile::descriptor(ptx::shared_address(shared.sK)) + KeyTile::offset(0, 64) +
           KeyTile::offset(0, 32) * Roles::consumer_group();
  }

  // Starts the product for columns of the previous step's dQ. `k` is the descriptor of these columns of K.
  template <int kOwnTiles> __device__ void start_dq(float (&dq)[kOwnTiles][4], uint64_t k) const {
    uint64_t ds = Shared::Tile::descriptor(ptx::shared_address(shared.sdS[ds_stage(ds_steps - 1)]));
    if constexpr (kSmall) ds += Shared::Tile::offset(0, 64) * Roles::consumer_group();
    ptx::warpgroup_arrive();
    const auto add = [&](uint64_t a, uint64_t b, auto keys) {
      warpgroup_gemm_ss_columns<Element, typename Shared::Tile, ptx::Major::mn, KeyTile, decltype(keys)::value>(
          dq, a, b, false);
    };
    const uint32_t high = previous.concerned_groups / 2;
    if (previous.concerned_groups == 3)
      add(ds, k, std::integral_constant<int, 128>{});
    else
      add(ds + Shared::Tile::offset(64, 0) * high, k + KeyTile::offset(64, 0) * high,
          std::integral_constant<int, 64>{});
    ptx::warpgroup_commit_batch();
  }

  // Adds the finished columns of the previous step's dQ to the sums, from tile `first_tile` on.
  template <int kOwnTiles> __device__ void add_dq(float (&dq)[kOwnTiles][4], int first_tile = 0) const {
    ptx::warpgroup_fence_operand(dq);
    if (previous.concerned_groups == 0) return;
#pragma unroll
    for (int n = 0; n < kOwnTiles; ++n)
      if (n < own_tiles()) ptx::add_global(previous.dq + (first_tile + n) * 128, dq[n]);
  }
  // Releases the stage of the previous step's dS'.
  __device__ void release_ds() const {
    if (previous.concerned_groups) ptx::arrive(shared.ds_empty[ds_stage(ds_steps - 1)]);
  }

  // The products of a step that concerns this warpgroup's keys. The parts of its rows use the same registers one after
  // the other.
  __device__ void run_step(const StepFacts &facts, int stage) {
    Scores scores, gradients;
    uint32_t p[kRows / 16][4], ds[kRows / 16][4];
    using Part = uint32_t[kScoreRows / 16][4];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      auto &own_p = reinterpret_cast<Part &>(p[kScoreRows / 16 * part]);
      auto &own_ds = reinterpret_cast<Part &>(ds[kScoreRows / 16 * part]);
      this->start_scores(scores, gradients, stage, part);
      this->compute_p_and_ds(facts, scores, gradients, stage, part);
      pack_left<Element>(own_p, scores[0]);
      pack_left<Element>(own_ds, gradients[0]);
      if (part == 0) Roles::producer_acquire(shared.ds_empty[ds_stage(ds_steps)], ds_phase(ds_steps));
      store_left<typename Shared::Tile>(own_ds, ptx::shared_address(shared.sdS[ds_stage(ds_steps)]),
                                        threadIdx.x / 32 * 16, kScoreRows * part);
    }
    ptx::fence_async_proxy();
    ptx::arrive(shared.ds_full[ds_stage(ds_steps)]);
    auto &dq = reinterpret_cast<float (&)[kTiles][4]>(scores[0]);
    wait_for_ds();
    start_dq(dq, panel());
    Base::start_sum(sums.dv[0], p, shared.sdO[stage]);
    Base::start_sum(sums.dk[0], ds, shared.sQ[stage]);
    ptx::warpgroup_wait<2>();
    release_ds();
    add_dq(dq);
    ptx::warpgroup_wait<0>(sums.dv[0], sums.dk[0], p, ds);
  }

  // Stores P' of a step in the memory of its dS'. bfloat16 has the range of P'. float16 does not: with a large sink,
  // all P' of a row could round to 0, but dS' needs them for dlse. So float16 stores both halves of the float32.
  __device__ void store_p(const Scores &scores, const uint32_t (&p)[kRows / 16][4], uint32_t tile) const {
    const int first_key = threadIdx.x / 32 * 16;
    if constexpr (Shared::kHasLowHalves) {
#pragma unroll
      for (int k = 0; k < kRows / 16; ++k) {
        uint32_t high[1][4], low[1][4];
        split_left(high[0], low[0], scores[0][2 * k], scores[0][2 * k + 1]);
        store_left<typename Shared::Tile>(high, tile, first_key, 16 * k);
        store_left<typename Shared::Tile>(low, ptx::shared_address(shared.low_halves), first_key, 16 * k);
      }
    } else {
      store_left<typename Shared::Tile>(p, tile, first_key, 0);
    }
    __syncwarp();
  }
  // Loads P' of 16 rows, those of tile k.
  __device__ void load_p(float (&probabilities)[2][4], uint32_t tile, int k) const {
    const int first_key = threadIdx.x / 32 * 16;
    uint32_t high[1][4], low[1][4];
    load_left<typename Shared::Tile>(high, tile, first_key, 2 * k);
    if constexpr (Shared::kHasLowHalves) {
      load_left<typename Shared::Tile>(low, ptx::shared_address(shared.low_halves), first_key, 2 * k);
      join_left(probabilities[0], probabilities[1], high[0], low[0]);
    } else {
      unpack_left<Element>(probabilities, high);
    }
  }

  // run_step() with fewer registers, since the sums of large heads take 160. The products run one after the other,
  // overlapped with those of the other warpgroup. P' is kept in shared memory.
  __device__ void run_large_step(const StepFacts &facts, int stage) {
    finish_previous();
    const auto &rows = this->own_rows(stage);
    const bool test = this->needs_test(facts, facts.first_row, kRows);
    const ScoreFactors factors = ScoreFactors::uncapped(this->params.p);
    const uint32_t own_ds_stage = ds_stage(ds_steps), tile = ptx::shared_address(shared.sdS[own_ds_stage]);
    Scores scores;
    uint32_t p[kRows / 16][4], ds[kRows / 16][4];
    ptx::warpgroup_arrive();
    this->start_key_product(scores, Base::row_desc(shared.sQ[stage]));
    ptx::warpgroup_wait<0>(scores[0]);
    if (test)
      sums.template compute_p<PairTests::kept_and_cut>(rows, facts.first_row, facts.buffer, scores, factors);
    else
      sums.template compute_p<PairTests::none>(rows, facts.first_row, facts.buffer, scores, factors);
    pack_left<Element>(p, scores[0]);
    Roles::producer_acquire(shared.ds_empty[own_ds_stage], ds_phase(ds_steps));
    store_p(scores, p, tile);
    Base::template start_sum<DoutTile>(sums.dv[0], p, shared.sdO[stage]);
    ptx::warpgroup_wait<0>(sums.dv[0], p);
    ptx::warpgroup_arrive();
    this->start_value_product(scores, Base::row_desc(shared.sdO[stage]));
    ptx::warpgroup_wait<0>(scores[0]);
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k) {
      float probabilities[1][2][4];
      load_p(probabilities[0], tile, k);
      auto &gradients = reinterpret_cast<float (&)[1][2][4]>(scores[0][2 * k]);
      sums.template compute_ds<PairTests::kept>(rows, probabilities, gradients, 2 * k);
      pack_left<Element>(reinterpret_cast<uint32_t (&)[1][4]>(ds[k]), gradients[0]);
    }
    __syncwarp();
    store_left<typename Shared::Tile>(ds, tile, threadIdx.x / 32 * 16, 0);
    ptx::fence_async_proxy();
    ptx::arrive(shared.ds_full[own_ds_stage]);
    Base::start_sum(sums.dk[0], ds, shared.sQ[stage]);
    ptx::warpgroup_wait<0>(sums.dk[0], ds);
  }

  // Computes this warpgroup's columns of the previous step's dQ, and adds them to the sums.
  __device__ void finish_previous() const {
    wait_for_ds();
    const auto finish = [&](auto tiles, uint64_t k, int first_tile) {
      float dq[tiles][4];
      start_dq(dq, k);
      ptx::warpgroup_wait<0>();
      add_dq(dq, first_tile);
    };
    finish(std::integral_constant<int, kTiles>{}, panel(), 0);
    // The middle panel follows the first warpgroup's panel and precedes the second one's.
    if constexpr (kLarge)
      finish(std::integral_constant<int, kHalfPanelTiles>{}, half_panel(),
             Roles::consumer_group() ? -kHalfPanelTiles : kTiles);
    release_ds();
  }

  // The address of this thread's part of the dQ sums of row 0, in the first head of the group.
  __device__ float *thread_dq_sums() const {
    const int panel = Roles::consumer_group(), band = threadIdx.x / 32 % 4 + (kSmall ? 4 * panel : 0);
    const KeyTask &task = sums.keys.task();
    float *rows = query_sums(this->params, task.s, task.sequence_index, task.first_head, 0);
    return rows + (band * (kHeadDim / 8) + panel * (kPanelDistance / 8)) * 128 + threadIdx.x % 32 * 4;
  }
  __device__ void run() {
    Roles::consumer_wait(shared.keys_full, 0);
    if (!uniform(shared.has_key_block)) return;
    if constexpr (Config::kHasRowPlans) this->clear_non_finite_keys();
    this->load_keys();
    sums.start();
    const int group = Roles::consumer_group();
    dq_sums = thread_dq_sums();
    for (PipelineState<Config::kStages> state;; ++state) {
      Roles::consumer_wait(shared.full[state.index], state.phase);
      const StepFacts facts = shared.stages[state.index].facts.read();
      if (!facts.valid) break;
      if (facts.concerned_groups) {
        const int64_t row = facts.head * this->params.query_sums.head_rows + facts.first_row;
        const Step step{dq_sums + row * kHeadDim, facts.concerned_groups};
        if (facts.concerned_groups >> group & 1) {
          if constexpr (kLarge)
            run_large_step(facts, state.index);
          else
            run_step(facts, state.index);
        } else {
          ptx::arrive(shared.ds_full[ds_stage(ds_steps)]);
          finish_previous();
        }
        previous = step;
        ++ds_steps;
      }
      Roles::consumer_release(shared.empty[state.index]);
    }
    finish_previous();
    sums.write_bias(0);
    if constexpr (Config::Keys::kSegments) add_segment_sums<Config>(shared, sums);
    sums.write();
  }
};

} // namespace fdm::cuda
