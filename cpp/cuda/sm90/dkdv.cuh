// SPDX-License-Identifier: BSD-3-Clause
// The gradients of keys, values and of a bias that is the same for every query, with Hopper's wgmma: one block of threads
// for a block of keys or a part of its work, as attention/dkdv.cuh tells.
//
// K and V stay in shared memory, 64 keys for each of two consumer warpgroups; a producer warpgroup finds the steps and
// loads their rows of Q and dO. While one consumer makes P' and dS', the other's products keep the tensor cores busy.
#pragma once

#include "../attention/key_gradients.cuh"
#include "products.cuh"
#include "roles.cuh"

namespace fdm::cuda::sm90 {

struct Producers {
  static constexpr int kThreads = Roles::kProducerThreads;
  __device__ static __forceinline__ int thread() { return Roles::producer_thread(); }
  __device__ static __forceinline__ void sync() { Roles::sync_producers(); }
};

// kKeyGradient: dk and the bias gradient; kValueGradient: dv.
template <class ElementType, int kHeadDimension, int kRowCount, int kStageCount, bool kKeyGradients,
          bool kValueGradients>
struct DkdvConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kKeys = 128, kRows = kRowCount, kStages = kStageCount;
  static constexpr bool kKeyGradient = kKeyGradients, kValueGradient = kValueGradients;
  static_assert(kKeys == 64 * Roles::kConsumerGroups && kKeys == Roles::kProducerThreads);
  using KeyTile = PanelTile<kHeadDim, kKeys>;
  using RowTile = PanelTile<kHeadDim, kRows>;
  // The steps in the stages, one that is being loaded and one that is found ahead may be of different heads.
  using Keys = KeyBlock<kKeys, Producers, kStages + 2>;
  using Gradients = KeyGradients<Element, kKeys, 1, kRows, kHeadDim, kKeyGradient, kValueGradient, false, Keys>;
};

// A tile of rows while it passes.
template <int kKeys, int kRows> struct PassingRows : RowStage<kKeys, kRows> {
  bool careful[Roles::kProducerWarps]; // rows of very large lse, by the warp that loaded them
  bool head_ends;
};

template <class Config> struct DkdvShared {
  alignas(1024) char k[Config::KeyTile::kBytes];
  char v[Config::KeyTile::kBytes];
  char q[Config::kStages][Config::RowTile::kBytes], dout[Config::kStages][Config::RowTile::kBytes];
  PassingRows<Config::kKeys, Config::kRows> stages[Config::kStages]; // a step that is not valid: there are no more
  typename Config::Keys::Shared keys;
  uint64_t keys_full, full[Config::kStages], empty[Config::kStages];

  // By one thread.
  __device__ void init() {
    ptx::init_barrier(keys_full, 2 * Roles::kProducerThreads);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::init_barrier(full[stage], 2 * Roles::kProducerThreads);
      ptx::init_barrier(empty[stage], Roles::kConsumerWarps);
    }
  }
};

template <class Config> struct DkdvProducer {
  static constexpr int kRows = Config::kRows, kOwnRows = kRows / Roles::kProducerWarps;

  const BackwardParams &params;
  DkdvShared<Config> &shared;
  typename Config::Keys keys;
  StageCursor<Config::kStages> cursor;

  __device__ DkdvProducer(const BackwardParams &parameters, DkdvShared<Config> &memory)
      : params(parameters), shared(memory), keys(parameters, memory.keys) {}

  __device__ static int warp() { return Roles::producer_thread() / 32; }
  // The row of a tile that this lane knows, of the tile's rows.
  __device__ static bool has_row() { return threadIdx.x % 32 < kOwnRows; }
  __device__ static int row() { return warp() * kOwnRows + threadIdx.x % 32; }

  __device__ void load_keys() {
    const int r = Roles::producer_thread();
    const auto load = [&](const fdm_tensor &t, char *to) {
      const uint16_t *from = kZeroRow;
      if (shared.keys.readable[r]) from = static_cast<const uint16_t *>(t.data) + keys.row_offset(t, r);
      Config::KeyTile::template gather<Roles::kProducerWarps>(ptx::shared_address(to), warp(), from,
                                                              int(params.p.head_dim));
    };
    load(params.p.k, shared.k), load(params.p.v, shared.v);
    publish(shared.keys_full);
  }

  __device__ static void publish(uint64_t &full) { ptx::arrive_after_copies(full), ptx::arrive(full); }

  // Of this lane's row of a step; rows that do not exist have none.
  __device__ RowStatistics load_statistics(const KeyStep &step) const {
    const int i = step.tile * kRows + row();
    if (!step.valid || !has_row() || i >= keys.task().s.q_count) return {INFINITY, 0.0f};
    return row_statistics(params, keys.task().s, keys.head(step), i);
  }

  // Rows without a gradient are zeros, whatever lies there: not even NaN in dO may reach a result.
  __device__ void load_rows(const KeyStep &step, const RowStatistics &statistics, bool head_ends) {
    auto &stage = shared.stages[cursor.stage];
    if (has_row()) stage.lse[row()] = statistics.lse, stage.delta[row()] = statistics.delta;
    const bool careful = __any_sync(0xffffffffu, !statistics.empty() && fabsf(statistics.lse) > kLargeLse);
    if (threadIdx.x % 32 == 0) stage.careful[warp()] = careful;
    if (Roles::producer_thread() == 0) stage.step = step, stage.head_ends = head_ends;
    const auto load = [&](const fdm_tensor &t, char *to) {
      const uint16_t *from = kZeroRow;
      if (!statistics.empty())
        from = static_cast<const uint16_t *>(t.data) +
               row_offset(t, keys.task().s, step.tile * kRows + row(), keys.head(step));
      Config::RowTile::template gather<Roles::kProducerWarps>(ptx::shared_address(to), warp(), from,
                                                              int(params.p.head_dim));
    };
    load(params.p.q, shared.q[cursor.stage]), load(params.a.dout, shared.dout[cursor.stage]);
    if (keys.task().words) {
      const int r = Roles::producer_thread();
      const int32_t key = shared.keys.key[r];
      ptx::copy_async_16(ptx::shared_address(&stage.words[r]), keys.words(step, kRows) + max(key, 0), key >= 0);
    }
  }

  __device__ void run(const KeyItem &item) {
    keys.start(item, Config::kKeyGradient);
    load_keys();
    KeyStep step = keys.first_step(kRows);
    RowStatistics statistics = load_statistics(step);
    for (; step.valid; cursor.next()) {
      const KeyStep next = keys.next_step(step, kRows);
      const RowStatistics next_statistics = load_statistics(next);
      ptx::wait(shared.empty[cursor.stage], cursor.parity ^ 1);
      load_rows(step, statistics, !next.valid || next.head != step.head);
      publish(shared.full[cursor.stage]);
      step = next, statistics = next_statistics;
    }
    ptx::wait(shared.empty[cursor.stage], cursor.parity ^ 1);
    if (Roles::producer_thread() == 0) shared.stages[cursor.stage].step = step;
    publish(shared.full[cursor.stage]);
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
  uint64_t k_tile, v_tile;

  __device__ DkdvConsumer(const BackwardParams &parameters, DkdvShared<Config> &memory)
      : params(parameters), shared(memory), sums(parameters, memory.keys) {
    const uint64_t own_keys = KeyTile::offset(64 * Roles::consumer_group(), 0);
    k_tile = KeyTile::descriptor(ptx::shared_address(shared.k)) + own_keys;
    v_tile = KeyTile::descriptor(ptx::shared_address(shared.v)) + own_keys;
  }

  // S' and then dP', in a group each.
  __device__ void start_scores(Scores &scores, Scores &gradients, int stage) const {
    ptx::fence_products();
    start_rows<Element, KeyTile, RowTile, kHeadDim>(scores[0], k_tile, row_tile(shared.q[stage]), false);
    ptx::commit_products();
    if constexpr (Config::kKeyGradient) {
      start_rows<Element, KeyTile, RowTile, kHeadDim>(gradients[0], v_tile, row_tile(shared.dout[stage]), false);
      ptx::commit_products();
    }
  }

  __device__ static uint64_t row_tile(const char *tile) { return RowTile::descriptor(ptx::shared_address(tile)); }

  __device__ void start_sum(float (&sum)[kHeadDim / 8][4], const Scores &left, const char *tile) {
    uint32_t packed[kRows / 16][4];
    pack_left<Element>(packed, left[0]);
    ptx::fence_products();
    start_columns<Element, RowTile>(sum, packed, row_tile(tile));
    ptx::commit_products();
  }

  // P' is made while the tensor cores work at dP', dS' while they work at dV. With a softcap both are made at a time.
  __device__ void run_step(int number) {
    const auto &stage = shared.stages[number];
    const auto &careful = stage.careful;
    const bool test = sums.must_test(stage, careful[0] || careful[1] || careful[2] || careful[3]);
    const bool cap = params.p.softcap > 0;
    Scores scores, gradients;
    start_scores(scores, gradients, number);
    if (cap) {
      ptx::wait_products<0>();
      ptx::hold(scores[0]), ptx::hold(gradients[0]);
      sums.make_all(stage, test, scores, gradients);
    } else {
      ptx::wait_products<Config::kKeyGradient ? 1 : 0>();
      ptx::hold(scores[0]);
      sums.template make_without_cap<true, false>(stage, test, scores, gradients);
    }
    if constexpr (Config::kValueGradient) start_sum(sums.dv[0], scores, shared.dout[number]);
    if constexpr (Config::kKeyGradient) {
      ptx::wait_products<Config::kValueGradient ? 1 : 0>();
      ptx::hold(gradients[0]);
      if (!cap) sums.template make_without_cap<false, true>(stage, test, scores, gradients);
      start_sum(sums.dk[0], gradients, shared.q[number]);
    }
    ptx::wait_products<0>();
    ptx::hold(sums.dv[0]), ptx::hold(sums.dk[0]);
  }

  __device__ void run() {
    sums.start();
    Roles::wait_full(shared.keys_full, 0);
    for (StageCursor<Config::kStages> cursor;; cursor.next()) {
      Roles::wait_full(shared.full[cursor.stage], cursor.parity);
      const auto &stage = shared.stages[cursor.stage];
      if (!stage.step.valid) break;
      if (sums.keys.concerns(Roles::consumer_group(), stage.step, kRows)) run_step(cursor.stage);
      if (params.bias_heads > 1 && stage.head_ends) sums.write_bias(stage.step.head);
      Roles::release(shared.empty[cursor.stage]);
    }
    if (params.bias_heads == 1) sums.write_bias(0);
    sums.write();
  }
};

template <class Config>
__global__ void __launch_bounds__(Roles::kThreads, 1) dkdv_kernel(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto &shared = *reinterpret_cast<DkdvShared<Config> *>(dynamic_shared);
  if (int(blockIdx.x) >= *params.keys.item_count) return;
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  using Registers = RoleRegisters<224, 56>;
  if (Roles::is_producer()) {
    Registers::produce();
    DkdvProducer<Config>(params, shared).run(params.keys.items[blockIdx.x]);
  } else {
    Registers::consume();
    DkdvConsumer<Config>(params, shared).run();
  }
}

} // namespace fdm::cuda::sm90
