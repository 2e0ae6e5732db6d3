// SPDX-License-Identifier: BSD-3-Clause
// The gradients of keys, values and of a bias that is the same for every query, with Hopper's wgmma: one block of
// threads for a block of keys or a part of its work, as ../dkdv.cuh tells.
//
// K and V stay in shared memory, 64 keys for each of two consumer warpgroups; a producer warpgroup finds the steps and
// loads their rows of Q and dO. While one consumer makes P' and dS', the other's products keep the tensor cores busy.
#pragma once

#include <type_traits>

#include "../../ptx/dependent.cuh"
#include "../../tile/sm90/products.cuh"
#include "../../tile/sm90/roles.cuh"
#include "../key_gradients.cuh"

namespace fdm::cuda::sm90 {

struct Producers {
  static constexpr int kThreads = Roles::kProducerThreads;
  __device__ static __forceinline__ int thread() { return Roles::producer_thread(); }
  __device__ static __forceinline__ void sync() { Roles::sync_producers(); }
};

template <class ElementType, int kHeadDimension, int kRowCount, int kStageCount, bool kHasSoftcap> struct DkdvConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kKeys = 128, kRows = kRowCount, kStages = kStageCount;
  static constexpr bool kSoftcap = kHasSoftcap;
  static_assert(kKeys == 64 * Roles::kConsumerGroups && kKeys == Roles::kProducerThreads);
  using KeyTile = PanelTile<kHeadDim, kKeys>;
  using RowTile = PanelTile<kHeadDim, kRows>;
  // The steps in the stages, one that is being loaded and one that is found ahead may be of different heads.
  using Keys = KeyBlock<kKeys, Producers, kStages + 2>;
  using Gradients = KeyGradients<Element, kKeys, 1, kRows, kHeadDim, true, true, false, Keys>;
};

// What is known of a tile of rows while it is in shared memory.
template <int kKeys, int kRows> struct PassingRows : RowStage<kKeys, kRows> {
  bool careful[Roles::kProducerWarps]; // rows of very large lse, by the warp that loaded them
  bool head_ends;
};

template <class Config> struct DkdvShared {
  alignas(1024) char sK[Config::KeyTile::kBytes];
  char sV[Config::KeyTile::kBytes];
  char sQ[Config::kStages][Config::RowTile::kBytes], sdO[Config::kStages][Config::RowTile::kBytes];
  PassingRows<Config::kKeys, Config::kRows> stages[Config::kStages]; // a step that is not valid ends the steps
  typename Config::Keys::Shared keys;
  uint64_t keys_full, full[Config::kStages], empty[Config::kStages];

  // One thread of the block calls this, before the others use the barriers.
  __device__ void init() {
    ptx::init_barrier(keys_full, 2 * Roles::kProducerThreads);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::init_barrier(full[stage], 2 * Roles::kProducerThreads);
      ptx::init_barrier(empty[stage], Roles::kConsumerThreads);
    }
  }
};

template <class Config> struct DkdvProducer {
  static constexpr int kRows = Config::kRows, kOwnRows = kRows / Roles::kProducerWarps;

  const BackwardParams &params;
  DkdvShared<Config> &shared;
  typename Config::Keys keys;
  PipelineState<Config::kStages> state;
  int loaded_head = -1; // the query head of the group whose rows begin here
  int q_count = 0;
  const uint16_t *q_rows = nullptr, *dout_rows = nullptr;
  const RowStatistics *statistics = nullptr;

  __device__ DkdvProducer(const BackwardParams &parameters, DkdvShared<Config> &memory)
      : params(parameters), shared(memory), keys(parameters, memory.keys) {}

  __device__ static int warp() { return Roles::producer_thread() / 32; }
  // Each lane of a producer warp knows one row of a tile, or none.
  __device__ static bool has_row() { return threadIdx.x % 32 < kOwnRows; }
  __device__ static int row() { return warp() * kOwnRows + threadIdx.x % 32; }

  __device__ void load_keys() {
    const int r = Roles::producer_thread();
    const auto load = [&](const fdm_tensor &t, char *tile) {
      const uint16_t *row = kZeroRow;
      if (shared.keys.readable[r]) row = static_cast<const uint16_t *>(t.data) + keys.row_offset(t, r);
      Config::KeyTile::template gather<Roles::kProducerWarps>(ptx::shared_address(tile), warp(), row,
                                                              int(params.p.head_dim));
    };
    load(params.p.k, shared.sK);
    load(params.p.v, shared.sV);
    Roles::producer_commit(shared.keys_full);
  }

  // What this lane needs to know of its row of a step, found while the step before is loaded.
  struct LaneRow {
    const uint16_t *q, *dout;
    RowStatistics statistics; // lse = inf: there is no such row, or it has no gradient
  };

  __device__ LaneRow find_row(const KeyStep &step) {
    if (step.valid && step.head != loaded_head) find_head(step);
    const int i = step.tile * kRows + row();
    LaneRow found{q_rows + i * params.p.q.stride[1], dout_rows + i * params.a.dout.stride[1], {INFINITY, 0.0f}};
    if (step.valid && has_row() && i < q_count) found.statistics = statistics[i];
    return found;
  }

  // Finds where the rows of a query head begin.
  __device__ void find_head(const KeyStep &step) {
    const Sequence &s = keys.task().s;
    const int64_t head = keys.head(step);
    const auto begin = [&](const fdm_tensor &t) {
      return static_cast<const uint16_t *>(t.data) + row_offset(t, s, 0, head);
    };
    loaded_head = step.head;
    q_count = int(s.q_count);
    q_rows = begin(params.p.q);
    dout_rows = begin(params.a.dout);
    statistics = &row_statistics(params, s, head, 0);
  }

  // Rows without a gradient are zeros, whatever lies there: not even NaN in dO may reach a result.
  __device__ void load_rows(const KeyStep &step, const LaneRow &lane_row, bool head_ends) {
    auto &stage = shared.stages[state.index];
    if (has_row()) {
      stage.lse[row()] = lane_row.statistics.lse;
      stage.delta[row()] = lane_row.statistics.delta;
    }
    const bool empty = lane_row.statistics.empty();
    const bool careful = __any_sync(0xffffffffu, !empty && fabsf(lane_row.statistics.lse) > kLargeLse);
    if (threadIdx.x % 32 == 0) stage.careful[warp()] = careful;
    if (Roles::producer_thread() == 0) {
      stage.step = step;
      stage.head_ends = head_ends;
    }
    const auto load = [&](const uint16_t *row, char *tile) {
      Config::RowTile::template gather<Roles::kProducerWarps>(ptx::shared_address(tile), warp(), empty ? kZeroRow : row,
                                                              int(params.p.head_dim));
    };
    load(lane_row.q, shared.sQ[state.index]);
    load(lane_row.dout, shared.sdO[state.index]);
    if (keys.task().words) {
      const int r = Roles::producer_thread();
      const int32_t key = shared.keys.key[r];
      ptx::cp_async_16(ptx::shared_address(&stage.words[r]), keys.words(step, kRows) + max(key, 0), key >= 0);
    }
  }

  __device__ void run(const KeyItem &item) {
    keys.start(item, true);
    load_keys();
    KeyStep step = keys.first_step(kRows);
    LaneRow lane_row = find_row(step);
    for (; step.valid; ++state) {
      const KeyStep next = keys.next_step(step, kRows);
      const LaneRow next_row = find_row(next);
      Roles::producer_acquire(shared.empty[state.index], state.phase);
      load_rows(step, lane_row, !next.valid || next.head != step.head);
      Roles::producer_commit(shared.full[state.index]);
      step = next;
      lane_row = next_row;
    }
    Roles::producer_acquire(shared.empty[state.index], state.phase);
    if (Roles::producer_thread() == 0) shared.stages[state.index].step = step;
    Roles::producer_commit(shared.full[state.index]);
  }
};

template <class Config> struct DkdvConsumer {
  using Element = typename Config::Element;
  using KeyTile = typename Config::KeyTile;
  using RowTile = typename Config::RowTile;
  static constexpr int kRows = Config::kRows, kHeadDim = Config::kHeadDim;
  using Scores = float[1][kRows / 8][4];

  const BackwardParams &params;
  DkdvShared<Config> &shared;
  typename Config::Gradients sums;
  uint64_t k_desc, v_desc;

  __device__ DkdvConsumer(const BackwardParams &parameters, DkdvShared<Config> &memory)
      : params(parameters), shared(memory), sums(parameters, memory.keys) {
    const uint64_t own_keys = KeyTile::offset(64 * Roles::consumer_group(), 0);
    k_desc = KeyTile::descriptor(ptx::shared_address(shared.sK)) + own_keys;
    v_desc = KeyTile::descriptor(ptx::shared_address(shared.sV)) + own_keys;
  }

  // Starts the products S' and dP'.
  __device__ void start_scores(Scores &scores, Scores &gradients, int stage) const {
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss<Element, KeyTile, RowTile, kHeadDim>(scores[0], k_desc, row_desc(shared.sQ[stage]), false);
    warpgroup_gemm_ss<Element, KeyTile, RowTile, kHeadDim>(gradients[0], v_desc, row_desc(shared.sdO[stage]), false);
    ptx::warpgroup_commit_batch();
  }

  __device__ static uint64_t row_desc(const char *tile) { return RowTile::descriptor(ptx::shared_address(tile)); }

  __device__ void start_sum(float (&sum)[kHeadDim / 8][4], const Scores &left, const char *tile) {
    uint32_t packed[kRows / 16][4];
    pack_left<Element>(packed, left[0]);
    ptx::warpgroup_arrive();
    warpgroup_gemm_rs<Element, RowTile>(sum, packed, row_desc(tile));
    ptx::warpgroup_commit_batch();
  }

  // The products are not overlapped with the elementwise work of the same warpgroup: that takes more registers than
  // there are, and was slower.
  __device__ void run_step(int number) {
    const auto &stage = shared.stages[number];
    const auto &careful = stage.careful;
    Scores scores, gradients;
    start_scores(scores, gradients, number);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_fence_operand(scores[0]);
    ptx::warpgroup_fence_operand(gradients[0]);
    sums.template make<Config::kSoftcap>(stage, careful[0] || careful[1] || careful[2] || careful[3], scores,
                                         gradients);
    start_sum(sums.dv[0], scores, shared.sdO[number]);
    start_sum(sums.dk[0], gradients, shared.sQ[number]);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_fence_operand(sums.dv[0]);
    ptx::warpgroup_fence_operand(sums.dk[0]);
  }

  __device__ void run() {
    sums.start();
    Roles::consumer_wait(shared.keys_full, 0);
    for (PipelineState<Config::kStages> state;; ++state) {
      Roles::consumer_wait(shared.full[state.index], state.phase);
      const auto &stage = shared.stages[state.index];
      if (!stage.step.valid) break;
      if (sums.keys.concerns(Roles::consumer_group(), stage.step, kRows)) run_step(state.index);
      if (params.bias_heads > 1 && stage.head_ends) sums.write_bias(stage.step.head);
      Roles::consumer_release(shared.empty[state.index]);
    }
    if (params.bias_heads == 1) sums.write_bias(0);
    sums.write();
  }
};

template <class Config> __device__ void run_item(const BackwardParams &params) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto &shared = *reinterpret_cast<DkdvShared<Config> *>(dynamic_shared);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  // The producers take the registers that their pointers need, of those that the accumulators leave.
  using Registers = std::conditional_t<Config::kHeadDim <= 96, RoleRegisters<200, 104>, RoleRegisters<224, 56>>;
  if (Roles::is_producer()) {
    Registers::produce();
    DkdvProducer<Config>(params, shared).run(params.keys.items[blockIdx.x]);
  } else {
    Registers::consume();
    DkdvConsumer<Config>(params, shared).run();
  }
}

template <class Config>
__global__ void __launch_bounds__(Roles::kThreads, 1) dkdv_kernel(const __grid_constant__ BackwardParams params) {
  // All that is read here was there when dq started, so blocks may start while others are still at dq.
  if (!params.beside_dq) ptx::wait_for_kernel_ahead();
  if (int(blockIdx.x) < *params.keys.item_count) run_item<Config>(params);
  if (params.beside_dq && blockIdx.x == 0) ptx::wait_for_kernel_ahead();
}

} // namespace fdm::cuda::sm90
