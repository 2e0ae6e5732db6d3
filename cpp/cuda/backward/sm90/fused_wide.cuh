// SPDX-License-Identifier: BSD-3-Clause
// All gradients at once, as fused.cuh computes them, for head dimensions whose gradients of 64 keys fill the registers
// of two consumer warpgroups: each has half of the columns of dK, dV and dQ.
//
// Each warpgroup computes P' and dS' of half of a step's rows, and gives them to the other through shared memory.
#pragma once

#include "fused.cuh"

namespace fdm::cuda {

template <class Config> struct WideShared : KeyStationaryShared<Config> {
  // A row for each key, a column for each row of the step.
  using Tile = SmemTile<Config::kRows, Config::kKeys>;

  alignas(1024) char sP[Tile::kBytes];
  char sdS[Tile::kBytes];
  float dbias[Config::kKeys];
};

template <class Config> struct WideConsumer : KeyConsumer<Config> {
  using Base = KeyConsumer<Config>;
  using Shared = WideShared<Config>;
  using Tile = typename Shared::Tile;
  using Base::kRows, Base::kScoreRows, Base::kHeadDim, Base::sums;
  using typename Base::Element, typename Base::KeyTile, typename Base::RowTile, typename Base::Scores;
  static constexpr int kColumns = Config::kColumns;

  Shared &shared;

  __device__ WideConsumer(const BackwardParams &parameters, Shared &memory)
      : Base(parameters, memory), shared(memory) {}

  __device__ static void sync_consumers() { ptx::sync_threads<2, Roles::kConsumerThreads>(); }
  __device__ static int first_column() { return kColumns * Roles::consumer_group(); }
  // The second warpgroup may have fewer columns.
  __device__ static bool has_all_columns() { return kHeadDim == 2 * kColumns || Roles::consumer_group() == 0; }

  // Starts this warpgroup's columns of sum = left * right, or sum += left * right, summed over 64 keys or rows.
  template <bool kTransposed, class RightTile>
  __device__ static void start_columns(float (&sum)[kColumns / 8][4], const char *left, const char *right,
                                       bool accumulate) {
    const uint64_t a = Tile::descriptor(ptx::shared_address(left));
    const uint64_t b =
        RightTile::descriptor(ptx::shared_address(right)) + RightTile::offset(0, kColumns) * Roles::consumer_group();
    const auto multiply = [&](auto &own_sum) {
      warpgroup_gemm_ss_columns<Element, Tile, kTransposed, RightTile, 64>(own_sum, a, b, accumulate);
    };
    ptx::warpgroup_arrive();
    if (has_all_columns())
      multiply(sum);
    else
      multiply(reinterpret_cast<float (&)[kHeadDim / 8 - kColumns / 8][4]>(sum));
    ptx::warpgroup_commit_batch();
  }

  // Where this thread's part of dQ of a step is added.
  __device__ float *own_sums(const KeyStep &step) const {
    const KeyTask &task = sums.keys.task();
    const int tile = step.tile / Config::kParts;
    float *rows = query_sums(this->params, task.s, task.sequence_index, sums.keys.head(step), tile * kRows);
    return rows + (threadIdx.x / 32 % 4 * (kHeadDim / 8) + first_column() / 8) * 128 + threadIdx.x % 32 * 4;
  }

  __device__ void add_dq(float (&dq)[kColumns / 8][4], float *own) const {
    ptx::warpgroup_fence_operand(dq);
    const bool all = has_all_columns();
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
      if (all || first_column() + 8 * n < kHeadDim) ptx::add_global(own + n * 128, dq[n]);
  }

  // Gives P' and dS' of this warpgroup's rows to both.
  __device__ void store(const Scores &scores, const Scores &gradients) const {
    const int key = threadIdx.x / 32 % 4 * 16, row = kScoreRows * Roles::consumer_group();
    uint32_t packed[kScoreRows / 16][4];
    sync_consumers(); // the products that read those of the step before are done
    pack_left<Element>(packed, scores[0]);
    store_left<Tile>(packed, ptx::shared_address(shared.sP), key, row);
    pack_left<Element>(packed, gradients[0]);
    store_left<Tile>(packed, ptx::shared_address(shared.sdS), key, row);
    ptx::fence_async_proxy();
    sync_consumers();
  }

  __device__ void run_step(const StepFacts &facts, int number) {
    Scores scores, gradients;
    this->start_scores(scores, gradients, number);
    this->make(facts, scores, gradients, number);
    store(scores, gradients);
    float dq[kColumns / 8][4];
    start_columns<true, KeyTile>(dq, shared.sdS, shared.sK, false);
    start_columns<false, RowTile>(sums.dv[0], shared.sP, shared.sdO[number], true);
    start_columns<false, RowTile>(sums.dk[0], shared.sdS, shared.sQ[number], true);
    ptx::warpgroup_wait<2>();
    add_dq(dq, own_sums(this->own_rows(number).step));
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_fence_operand(sums.dv[0]);
    ptx::warpgroup_fence_operand(sums.dk[0]);
  }

  // The sums of the bias gradient over the rows of both warpgroups, which the first one writes.
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
    if (!uniform(shared.exists)) return;
    sums.start();
    for (PipelineState<Config::kStages> state;; ++state) {
      Roles::consumer_wait(shared.full[state.index], state.phase);
      const StepFacts facts = shared.stages[state.index].facts.read();
      if (!facts.valid) break;
      run_step(facts, state.index);
      Roles::consumer_release(shared.empty[state.index]);
    }
    write_bias();
    add_segment_sums<Config>(shared, sums, first_column());
    sums.write(first_column());
  }
};

} // namespace fdm::cuda
