// SPDX-License-Identifier: BSD-3-Clause
// All gradients at once, with Hopper's wgmma, for head dimensions from 65 to 128: five products for each key block and
// row tile, where kernels for dq and for dk and dv take seven. One thread block for a key block or a part of its work,
// as ../dkdv.cuh tells.
//
// dQ of a row tile is a sum over all key blocks, each of which adds its own part to float32 sums in global memory:
// FlashAttention-3's way, whose order is not fixed. The keys of a block belong to two consumer warpgroups, which give
// each other their dS through shared memory. Each then computes half of the step's dQ, a step later: so the one may be
// half a step ahead, and one's products keep the tensor cores busy while the other makes P' and dS'.
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

template <class Config> struct FusedConsumer : KeyConsumer<Config> {
  using Base = KeyConsumer<Config>;
  using Shared = FusedShared<Config>;
  using Base::kRows, Base::kHeadDim, Base::sums;
  using typename Base::Element, typename Base::KeyTile, typename Base::Scores;
  static constexpr int kColumns = 64; // of which a warpgroup computes dQ
  static_assert(kRows == 64 && kHeadDim > 64 && kHeadDim <= 128);

  // Facts about a step that are needed until its dQ is computed.
  struct Step {
    float *dq;         // this thread's part of the sums
    uint32_t keys = 0; // bit n: it concerns the keys of warpgroup n; none before the first step
  };

  Shared &shared;
  uint32_t ds_steps = 0; // whose dS' was given to the other warpgroup
  float *own_sums;       // this thread's part of the sums of the first row of the first head of the group
  Step before{};

  __device__ FusedConsumer(const BackwardParams &parameters, Shared &memory)
      : Base(parameters, memory), shared(memory) {}

  __device__ static uint32_t ds_stage(uint32_t step) { return step % Shared::kStages; }
  __device__ static uint32_t ds_phase(uint32_t step) { return step / Shared::kStages % 2; }

  // How many tiles of 8 columns of dQ are this warpgroup's.
  __device__ static int own_tiles() {
    if (kHeadDim == 96) return Roles::consumer_group() ? 4 : 8;
    return kColumns / 8;
  }

  // Starts this warpgroup's part of dQ of the step before.
  __device__ void start_dq(float (&dq)[kColumns / 8][4]) const {
    const uint32_t stage = ds_stage(ds_steps - 1);
    if (before.keys) Roles::consumer_wait(shared.ds_full[stage], ds_phase(ds_steps - 1));
    const int group = Roles::consumer_group();
    const uint64_t ds = Shared::Tile::descriptor(ptx::shared_address(shared.sdS[stage]));
    const uint64_t k = KeyTile::descriptor(ptx::shared_address(shared.sK)) + KeyTile::offset(0, 64) * group;
    ptx::warpgroup_arrive();
    const auto add = [&](uint64_t a, uint64_t b, auto keys) {
      warpgroup_gemm_ss_columns<Element, typename Shared::Tile, ptx::Major::mn, KeyTile, decltype(keys)::value>(
          dq, a, b, false);
    };
    const uint32_t high = before.keys / 2;
    if (before.keys == 3)
      add(ds, k, std::integral_constant<int, 128>{});
    else
      add(ds + Shared::Tile::offset(64, 0) * high, k + KeyTile::offset(64, 0) * high,
          std::integral_constant<int, 64>{});
    ptx::warpgroup_commit_batch();
  }

  // Adds this warpgroup's part of dQ of the step before, which is there, to the sums.
  __device__ void add_dq(float (&dq)[kColumns / 8][4]) const {
    ptx::warpgroup_fence_operand(dq);
    if (before.keys == 0) return;
    ptx::arrive(shared.ds_empty[ds_stage(ds_steps - 1)]);
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
      if (n < own_tiles()) ptx::add_global(before.dq + n * 128, dq[n]);
  }

  // The products of a step that concerns this warpgroup's keys.
  __device__ void run_step(const StepFacts &facts, int number) {
    Scores scores, gradients;
    uint32_t p[kRows / 16][4], ds[kRows / 16][4];
    this->start_scores(scores, gradients, number);
    this->make(facts, scores, gradients, number);
    pack_left<Element>(p, scores[0]);
    pack_left<Element>(ds, gradients[0]);
    const uint32_t stage = ds_stage(ds_steps);
    Roles::producer_acquire(shared.ds_empty[stage], ds_phase(ds_steps));
    store_left<typename Shared::Tile>(ds, ptx::shared_address(shared.sdS[stage]), threadIdx.x / 32 * 16, 0);
    ptx::fence_async_proxy();
    ptx::arrive(shared.ds_full[stage]);
    auto &dq = reinterpret_cast<float (&)[kColumns / 8][4]>(scores[0]);
    start_dq(dq);
    Base::start_sum(sums.dv[0], p, shared.sdO[number]);
    Base::start_sum(sums.dk[0], ds, shared.sQ[number]);
    ptx::warpgroup_wait<2>();
    add_dq(dq);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_fence_operand(sums.dv[0]);
    ptx::warpgroup_fence_operand(sums.dk[0]);
    ptx::warpgroup_fence_operand(p);
    ptx::warpgroup_fence_operand(ds);
  }

  __device__ void finish_before() const {
    float dq[kColumns / 8][4];
    start_dq(dq);
    ptx::warpgroup_wait<0>();
    add_dq(dq);
  }

  // Where this thread's part of dQ of the first row is added, for the first head of a group.
  __device__ float *first_sums() const {
    const int band = threadIdx.x / 32 % 4, panel = Roles::consumer_group();
    const KeyTask &task = sums.keys.task();
    float *rows = query_sums(this->params, task.s, task.sequence_index, task.first_head, 0);
    return rows + (band * (kHeadDim / 8) + panel * 8) * 128 + threadIdx.x % 32 * 4;
  }

  __device__ void run() {
    Roles::consumer_wait(shared.keys_full, 0);
    if (!uniform(shared.exists)) return;
    if constexpr (Config::kHasRowPlans) this->clear_non_finite_keys();
    sums.start();
    const int group = Roles::consumer_group();
    own_sums = first_sums();
    for (PipelineState<Config::kStages> state;; ++state) {
      Roles::consumer_wait(shared.full[state.index], state.phase);
      const StepFacts facts = shared.stages[state.index].facts.read();
      if (!facts.valid) break;
      if (facts.concerns) {
        const int64_t row = facts.head * this->params.query_sums.head_rows + facts.first;
        const Step step{own_sums + row * kHeadDim, facts.concerns};
        if (facts.concerns >> group & 1) {
          run_step(facts, state.index);
        } else {
          ptx::arrive(shared.ds_full[ds_stage(ds_steps)]);
          finish_before();
        }
        before = step;
        ++ds_steps;
      }
      Roles::consumer_release(shared.empty[state.index]);
    }
    finish_before();
    sums.write_bias(0);
    if constexpr (Config::Keys::kSegments) add_segment_sums<Config>(shared, sums);
    sums.write();
  }
};

} // namespace fdm::cuda
