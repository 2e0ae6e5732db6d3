// SPDX-License-Identifier: BSD-3-Clause
// All gradients at once, as fused.cuh computes them, where blocks of keys have few steps: a warpgroup has 64 keys, loads
// its rows itself, and several of them share an SM. What one waits for at its beginning and end, others hide, for which a
// block of threads that fills an SM would need a second set of keys.
#pragma once

#include "../../tile/copy_rows.cuh"
#include "../../tile/sm90/products.cuh"
#include "../key_gradients.cuh"
#include "fused_kernel.cuh"
#include "ptx/dependent.cuh"
#include "ptx/store.cuh"
#include "ptx/tensor.cuh"

namespace fdm::cuda {

template <class ElementType, int kHeadDimension, bool kHasSoftcap> struct SmallBlocksConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kKeys = kSmallBlock.keys, kRows = kSmallBlock.rows, kStages = 2;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kBlocks = kHasSoftcap ? 2 : 3; // share an SM; a softcap takes more registers
  static constexpr bool kSoftcap = kHasSoftcap;
  using KeyTile = SmemTile<kHeadDim, kKeys>;
  using RowTile = SmemTile<kHeadDim, kRows>;
  using ScoreTile = SmemTile<kRows, kKeys>; // a row for each key
  using Keys = KeyBlock<kKeys, WholeBlock<kThreads>, 2, true, false, kKeys, true>;
  using Gradients = KeyGradients<Element, kKeys, 1, kRows, kHeadDim, true, true, false, Keys>;
};

template <class Config> struct SmallBlocksShared {
  alignas(1024) char sK[Config::KeyTile::kBytes];
  char sV[Config::KeyTile::kBytes];
  char sQ[Config::kStages][Config::RowTile::kBytes], sdO[Config::kStages][Config::RowTile::kBytes];
  char sdS[Config::ScoreTile::kBytes];
  typename Config::Gradients::Stage stages[Config::kStages];
  typename Config::Keys::Shared keys;
  uint64_t keys_full, full[Config::kStages];

  // One thread of the block calls this, before the others use the barriers.
  __device__ void init() {
    ptx::init_barrier(keys_full, Config::kThreads);
    for (uint64_t &barrier : full) ptx::init_barrier(barrier, Config::kThreads);
    ptx::fence_async_proxy(); // copies of boxes arrive at them
  }
};

// Starts the copies of a step's rows where TMA cannot make them. This is not inlined: it is seldom needed.
template <class Config>
__device__ __noinline__ void copy_rows_of_step(const BackwardParams &params, SmallBlocksShared<Config> &shared,
                                               KeyStep step, int stage) {
  using RowTile = typename Config::RowTile;
  constexpr int kOwnRows = Config::kRows / Config::kWarps;
  const KeyTask &task = shared.keys.task;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = step.tile * Config::kRows + warp * kOwnRows + lane;
  const auto load = [&](const fdm_tensor &t, const char *tile) {
    const uint16_t *row = kZeroRow;
    if (lane < kOwnRows && i < task.s.q_count)
      row = static_cast<const uint16_t *>(t.data) + row_offset(t, task.s, i, task.first_head + step.head);
    RowTile::template gather<Config::kWarps>(ptx::shared_address(tile), warp, row, int(params.p.head_dim));
  };
  load(params.p.q, shared.sQ[stage]);
  load(params.a.dout, shared.sdO[stage]);
  ptx::arrive_after_copies(shared.full[stage]);
}

template <class Config> struct SmallBlock {
  using Element = typename Config::Element;
  using KeyTile = typename Config::KeyTile;
  using RowTile = typename Config::RowTile;
  using ScoreTile = typename Config::ScoreTile;
  static constexpr int kRows = Config::kRows, kHeadDim = Config::kHeadDim;
  using Scores = float[1][kRows / 8][4];

  const BackwardParams &params;
  const RowMaps &maps;
  SmallBlocksShared<Config> &shared;
  typename Config::Gradients sums;

  __device__ SmallBlock(const BackwardParams &parameters, const RowMaps &row_maps, SmallBlocksShared<Config> &memory)
      : params(parameters), maps(row_maps), shared(memory), sums(parameters, memory.keys) {}

  __device__ void load_keys() const {
    constexpr int kOwnKeys = Config::kKeys / Config::kWarps;
    const int r = threadIdx.x / 32 * kOwnKeys + threadIdx.x % 32;
    const bool readable = threadIdx.x % 32 < kOwnKeys && shared.keys.readable[r];
    const auto load = [&](const fdm_tensor &t, const char *tile) {
      const uint16_t *row = kZeroRow;
      if (readable) row = static_cast<const uint16_t *>(t.data) + sums.keys.row_offset(t, r);
      KeyTile::template gather<Config::kWarps>(ptx::shared_address(tile), threadIdx.x / 32, row,
                                               int(params.p.head_dim));
    };
    load(params.p.k, shared.sK);
    load(params.p.v, shared.sV);
    ptx::arrive_after_copies(shared.keys_full);
  }

  // This step or the first after it that concerns the block's keys.
  __device__ KeyStep concerning(KeyStep step) {
    while (step.valid && !sums.keys.concerns(0, step, kRows)) step = sums.keys.next_step(step, kRows);
    return step;
  }

  // The statistics of this thread's row of a step. lse = inf: there is no such row, or it has no gradient.
  __device__ RowStatistics find_statistics(const KeyStep &step) const {
    const Sequence &s = sums.keys.task().s;
    const int i = step.tile * kRows + int(threadIdx.x);
    if (!step.valid || int(threadIdx.x) >= kRows || i >= s.q_count) return {INFINITY, 0.0f};
    return row_statistics(params, s, sums.keys.head(step), i);
  }

  // Starts the copies of a step's rows.
  __device__ void load_rows(const KeyStep &step, int stage) const {
    if (!step.valid) return;
    if (!maps.known) return copy_rows_of_step<Config>(params, shared, step, stage);
    if (threadIdx.x == 0) copy_boxes(step, stage);
    ptx::arrive(shared.full[stage]);
  }
  __device__ void copy_boxes(const KeyStep &step, int stage) const {
    uint64_t &full = shared.full[stage];
    const Sequence &s = sums.keys.task().s;
    const int row = int(s.q_begin) + step.tile * kRows, head = int(sums.keys.head(step)), batch = int(s.batch);
    ptx::expect_bytes(full, 2 * RowTile::kBytes);
#pragma unroll
    for (int panel = 0; panel < RowTile::kPanels; ++panel) {
      const uint32_t offset = panel * RowTile::kPanelBytes;
      ptx::copy_box(ptx::shared_address(shared.sQ[stage]) + offset, maps.q, 64 * panel, row, head, batch, full);
      ptx::copy_box(ptx::shared_address(shared.sdO[stage]) + offset, maps.dout, 64 * panel, row, head, batch, full);
    }
  }

  // Rows without a gradient become zeros, whatever lies there: not even NaN in dO may reach a result.
  __device__ void clear_empty_rows(int stage) const {
    for (int i = threadIdx.x; i < kRows * RowTile::kChunks; i += Config::kThreads) {
      const int r = i / RowTile::kChunks;
      if (shared.stages[stage].lse[r] != INFINITY) continue;
      for (const char *tile : {shared.sQ[stage], shared.sdO[stage]})
        ptx::store_shared(RowTile::chunk_address(ptx::shared_address(tile), r, i % RowTile::kChunks), uint4{});
    }
    ptx::fence_async_proxy();
    __syncthreads();
  }

  // Adds the products of a step to the sums.
  __device__ void run_step(int number, bool careful) {
    const auto &stage = shared.stages[number];
    const KeyStep &step = stage.step;
    const uint64_t k = KeyTile::descriptor(ptx::shared_address(shared.sK));
    const uint64_t v = KeyTile::descriptor(ptx::shared_address(shared.sV));
    const uint64_t q = RowTile::descriptor(ptx::shared_address(shared.sQ[number]));
    const uint64_t dout = RowTile::descriptor(ptx::shared_address(shared.sdO[number]));
    Scores scores, gradients;
    uint32_t p[kRows / 16][4], ds[kRows / 16][4];
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss<Element, KeyTile, RowTile, kHeadDim>(scores[0], k, q, false);
    ptx::warpgroup_commit_batch();
    warpgroup_gemm_ss<Element, KeyTile, RowTile, kHeadDim>(gradients[0], v, dout, false);
    ptx::warpgroup_commit_batch();
    if constexpr (Config::kSoftcap) {
      ptx::warpgroup_wait<0>();
      ptx::warpgroup_fence_operand(scores[0]);
      ptx::warpgroup_fence_operand(gradients[0]);
      sums.template make<true>(stage, careful, scores, gradients);
    } else {
      const bool test = sums.needs_test(stage, careful);
      ptx::warpgroup_wait<1>();
      ptx::warpgroup_fence_operand(scores[0]);
      if (test)
        sums.template make_probabilities<true>(stage, step.tile * kRows, step.buffer, scores);
      else
        sums.template make_probabilities<false>(stage, step.tile * kRows, step.buffer, scores);
      ptx::warpgroup_wait<0>();
      ptx::warpgroup_fence_operand(gradients[0]);
      if (test)
        sums.template make_score_gradients<true>(stage, scores, gradients);
      else
        sums.template make_score_gradients<false>(stage, scores, gradients);
    }
    pack_left<Element>(p, scores[0]);
    pack_left<Element>(ds, gradients[0]);
    const uint32_t sdS = ptx::shared_address(shared.sdS);
    store_left<ScoreTile>(ds, sdS, int(threadIdx.x) / 32 * 16, 0);
    ptx::fence_async_proxy();
    ptx::warpgroup_arrive();
    warpgroup_gemm_rs<Element, RowTile>(sums.dv[0], p, dout);
    ptx::warpgroup_commit_batch();
    warpgroup_gemm_rs<Element, RowTile>(sums.dk[0], ds, q);
    ptx::warpgroup_commit_batch();
    __syncthreads();          // dS' of all keys is there
    ptx::warpgroup_wait<1>(); // P' needs no registers any more
    ptx::warpgroup_fence_operand(sums.dv[0]);
    ptx::warpgroup_fence_operand(p);
    float dq[kHeadDim / 8][4];
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss_columns<Element, ScoreTile, true, KeyTile, Config::kKeys>(dq, ScoreTile::descriptor(sdS), k,
                                                                                false);
    ptx::warpgroup_commit_batch();
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_fence_operand(dq);
    ptx::warpgroup_fence_operand(sums.dk[0]);
    ptx::warpgroup_fence_operand(ds);
    const KeyTask &task = sums.keys.task();
    const QuerySums &dq_sums = params.query_sums;
    const int64_t row =
        (task.s.batch * params.p.heads + sums.keys.head(step)) * dq_sums.head_rows + int64_t(step.tile) * kRows;
    float *own = dq_sums.data + row * kHeadDim + threadIdx.x / 32 * (kHeadDim / 8) * 128 + threadIdx.x % 32 * 4;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) ptx::add_global(own + n * 128, dq[n]);
  }

  __device__ void run(const KeyBlockPlace &place) {
    sums.keys.start({place.block, 0, 1, 0}, place, false);
    // What is known of the step after the one that is computed.
    bool more;
    RowStatistics statistics;
    const auto prepare = [&](const KeyStep &step, int number) {
      more = step.valid;
      statistics = find_statistics(step);
      load_rows(step, number);
      if (threadIdx.x == 0) shared.stages[number].step = step;
    };
    prepare(concerning(sums.keys.first_step(kRows)), 0);
    load_keys();
    sums.start();
    ptx::wait(shared.keys_full, 0);
    for (PipelineState<Config::kStages> state; more; ++state) {
      auto &stage = shared.stages[state.index];
      if (int(threadIdx.x) < kRows) {
        stage.lse[threadIdx.x] = statistics.lse;
        stage.delta[threadIdx.x] = statistics.delta;
      }
      // Nobody reads the step before any more.
      const bool careful = __syncthreads_or(int(threadIdx.x) < kRows && fabsf(statistics.lse) > kLargeLse);
      prepare(concerning(sums.keys.next_step(stage.step, kRows)), state.index ^ 1);
      ptx::wait(shared.full[state.index], state.phase);
      ptx::fence_async_proxy();
      if (careful) clear_empty_rows(state.index);
      run_step(state.index, careful);
    }
    sums.write_bias(0);
    sums.add_segment_sums();
    sums.write();
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    small_blocks_kernel(const __grid_constant__ FusedParams params) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto &shared = *reinterpret_cast<SmallBlocksShared<Config> *>(dynamic_shared);
  if (threadIdx.x == 0) shared.init();
  ptx::wait_for_kernel_ahead();
  KeyBlockPlace place;
  if (!find_small_block(params, blockIdx.x, place)) return;
  SmallBlock<Config>(params, params.maps, shared).run(place);
}

} // namespace fdm::cuda
