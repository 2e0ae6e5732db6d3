// SPDX-License-Identifier: BSD-3-Clause
// All gradients of dense blocks at once, with Hopper's wgmma: a tile of 128 x 128 scores stays with a block of threads
// while the sources of its bias go by, and the tile of dbias stays in registers.
//
// Two consumer warpgroups have 64 rows each. S = Q K', P = exp(S - lse), dP = dO V' and dS = P (dP - delta) are theirs
// alone; P and dS then go to shared memory, since dV = P' dO and dK = dS' Q sum over the rows of both, 64 keys to each.
// dQ, dK and dV are sums over tiles of other blocks, so they are added to float32 sums in global memory, in no fixed
// order, as is a tile of dbias whose sources several blocks share.
//
// The kernel is persistent: while the results of a tile are written, the producer copies the first rows of the next.
//
// Nothing here knows the rare cases. What NaN, Inf and very large numbers do where a pair is not kept shows in sums that are
// not finite, which are found when they are rounded (../fused_sums.cu); then the kernels of fixed order do all.
#pragma once

#include "../../tile/sm90/products.cuh"
#include "fused_producer.cuh"
#include "fused_tile.cuh"
#include "ptx/dependent.cuh"

namespace fdm::cuda {

template <class Config> struct DenseFusedConsumer {
  using Element = typename Config::Element;
  using Pair = typename Config::Pair;
  using Tile = typename Pair::Tile;
  using Left = typename Config::Scores;
  static constexpr int kTiles = Config::kTile / 8, kOutTiles = Config::kHeadDim / 8;
  using Scores = float[kTiles][4];
  using Sums = float[kOutTiles][4];
  static constexpr int kFullBarrier = 4, kReadBarrier = 5; // of P and dS

  const DenseBackward &work;
  DenseFusedShared<Config> &shared;
  FusedBiasTile<Config> tile;
  PipelineState<Config::kStages> state;

  __device__ DenseFusedConsumer(const DenseBackward &own_work, DenseFusedShared<Config> &memory)
      : work(own_work), shared(memory), tile(own_work, memory) {}

  __device__ static int warp() { return threadIdx.x / 32; }
  __device__ static int lane() { return threadIdx.x % 32; }

  __device__ void store(const uint32_t (&packed)[kTiles / 2][4], const char *tile) const {
    store_left<typename Config::Scores>(packed, ptx::shared_address(tile), 16 * warp(), 0);
  }

  // Adds 16 rows for each warp, of this thread's accumulators of a tile of 128 that begins at row `first`, to the sums.
  __device__ static void add_sums(const GradientSums &sums, const SumHalves &tile, int first, const Sums &x) {
    if (!tile.first) return;
    const int64_t own = 16 * warp() * sums.row;
    SumBand<Config::kHeadDim>{{tile.first + own, tile.second + own}, sums.row, int(sums.rows) - first - 16 * warp()}
        .add(x);
  }
  __device__ int first_row() const { return tile.task.row_tile * kWideTile; }
  __device__ int first_key() const { return tile.task.key_tile * kWideTile; }

  struct Products {
    Sums dq, dk, dv;
  };

  __device__ uint64_t rows_of(int stage, int which) const {
    return Pair::descriptor(ptx::shared_address(shared.sRows[stage]), which);
  }
  __device__ uint64_t keys_of(int stage, int which) const {
    return Pair::descriptor(ptx::shared_address(shared.sKeys[stage]), which);
  }

  // Starts S = Q K' or dP = dO V' of this warpgroup's rows: the first or second of each pair.
  __device__ void start_scores(Scores &products, int stage, int which) const {
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss<Element, Tile, Tile, Config::kHeadDim>(
        products, rows_of(stage, which) + Tile::offset(64, 0) * Roles::consumer_group(), keys_of(stage, which), false);
    if constexpr (Config::kFolds) {
      const int group = Roles::consumer_group();
      const uint64_t left = which == 0 ? shared.known.shifts_of(stage, group) : shared.known.deltas_of(stage, group),
                     right = which == 0 ? shared.known.keys_of(stage, 0) : shared.known.ones_descriptor();
      ptx::wgmma_ss<Element, false, false>(products, left, right, true);
    }
    ptx::warpgroup_commit_batch();
  }

  // Starts dV = P' dO and dK = dS' Q of this warpgroup's keys, and dQ = dS K of its rows.
  __device__ void start_gradients(Products &sums, const uint32_t (&own_ds)[kTiles / 2][4], int stage) const {
    const int group = Roles::consumer_group();
    const uint64_t p = Config::Scores::descriptor(ptx::shared_address(shared.sScores[0])),
                   ds = Config::Scores::descriptor(ptx::shared_address(shared.sScores[1])),
                   own_keys = Config::Scores::offset(0, 64) * group;
    using Left = typename Config::Scores;
    warpgroup_gemm_ss_columns<Element, Left, true, Tile, Config::kTile>(sums.dv, p + own_keys, rows_of(stage, 1),
                                                                        false);
    warpgroup_gemm_ss_columns<Element, Left, true, Tile, Config::kTile>(sums.dk, ds + own_keys, rows_of(stage, 0),
                                                                        false);
    warpgroup_gemm_rs<Element, Tile>(sums.dq, own_ds, keys_of(stage, 0), false);
    ptx::warpgroup_commit_batch();
  }

  __device__ static void finish_gradients(Products &sums, uint32_t (&own_ds)[kTiles / 2][4]) {
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_fence_operand(sums.dq);
    ptx::warpgroup_fence_operand(sums.dk);
    ptx::warpgroup_fence_operand(sums.dv);
    ptx::warpgroup_fence_operand(own_ds);
  }

  // Adds what start_gradients() has made to the sums, and releases the stage.
  __device__ void add_gradients(const Products &sums, int stage) const {
    const auto place = shared.places[stage];
    Roles::consumer_release(shared.empty[stage]);
    add_sums(work.fused.dq, place.dq, first_row(), sums.dq);
    add_sums(work.fused.dk, place.dk, first_key(), sums.dk);
    add_sums(work.fused.dv, place.dv, first_key(), sums.dv);
  }

  // Makes the products of a step, whose results are this block's part of dq, dk and dv.
  __device__ void make_products(Products &sums, int stage) {
    Scores scores, gradients;
    uint32_t packed[kTiles / 2][4];
    start_scores(scores, stage, 0);
    start_scores(gradients, stage, 1);
    ptx::warpgroup_wait<1>();
    ptx::warpgroup_fence_operand(scores);
    tile.template make_probabilities<0>(scores, stage);
    pack_left<Element>(packed, scores);
    Roles::take_turn(Roles::consumer_group()); // the products of the step before have read P and dS
    store(packed, shared.sScores[0]);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_fence_operand(gradients);
    tile.template make_gradients<0>(scores, gradients, stage);
    pack_left<Element>(packed, gradients);
    store(packed, shared.sScores[1]);
    ptx::fence_async_proxy();
    ptx::sync_threads<kFullBarrier, Roles::kConsumerThreads>();
    ptx::warpgroup_arrive();
    start_gradients(sums, packed, stage);
    finish_gradients(sums, packed);
    Roles::pass_turn(Roles::consumer_group());
  }

  __device__ void step(int stage) {
    Products sums;
    make_products(sums, stage);
    add_gradients(sums, stage);
  }

  // A step where registers hold the results of one product of 128 columns beside those of the next, and shared memory has
  // one tile for P and dS, and one of each operand. Each is released once its last product has read it.
  __device__ void step_in_turn(uint32_t phase) {
    const int group = Roles::consumer_group();
    const uint64_t own_keys = Left::descriptor(ptx::shared_address(shared.sScores[0])) + Left::offset(0, 64) * group,
                   own_rows = Left::descriptor(ptx::shared_address(shared.sScores[0])) + Left::offset(64, 0) * group;
    uint32_t ds[kTiles / 2][4];
    wait_for(kQuery, phase);
    wait_for(kKey, phase);
    const auto place = shared.places[0];
    make_half<0>(ds, phase);
    make_half<1>(ds, phase);
    release(kValue);
    ptx::fence_async_proxy();
    ptx::sync_threads<kFullBarrier, Roles::kConsumerThreads>();
    Sums dv, dk, dq;
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss_columns<Element, Left, true, Tile, Config::kTile>(dv, own_keys, rows_of(0, 1), false);
    ptx::warpgroup_commit_batch();
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_fence_operand(dv);
    release(kDout);
    ptx::sync_threads<kReadBarrier, Roles::kConsumerThreads>(); // all have read P
    store_left<Left>(ds, ptx::shared_address(shared.sScores[0]), 16 * warp(), 0);
    ptx::fence_async_proxy();
    ptx::sync_threads<kFullBarrier, Roles::kConsumerThreads>();
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss_columns<Element, Left, true, Tile, Config::kTile>(dk, own_keys, rows_of(0, 0), false);
    ptx::warpgroup_commit_batch();
    add_sums(work.fused.dv, place.dv, first_key(), dv);
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss_columns<Element, Left, false, Tile, Config::kTile>(dq, own_rows, keys_of(0, 0), false);
    ptx::warpgroup_commit_batch();
    ptx::warpgroup_wait<1>();
    ptx::warpgroup_fence_operand(dk);
    release(kQuery);
    add_sums(work.fused.dk, place.dk, first_key(), dk);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_fence_operand(dq);
    release(kKey);
    Roles::pass_turn(group);
    add_sums(work.fused.dq, place.dq, first_row(), dq);
  }

  // Stores P of 64 keys, and rounds their dS.
  template <int kHalf> __device__ void make_half(uint32_t (&ds)[kTiles / 2][4], uint32_t phase) {
    constexpr int kCount = kTiles / 2, kFirst = kHalf * kCount;
    const uint64_t own_rows = Tile::offset(64, 0) * Roles::consumer_group(), keys = Tile::offset(8 * kFirst, 0);
    float scores[kCount][4], gradients[kCount][4];
    uint32_t packed[kCount / 2][4];
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss<Element, Tile, Tile, Config::kHeadDim>(scores, rows_of(0, 0) + own_rows, keys_of(0, 0) + keys,
                                                             false);
    ptx::warpgroup_commit_batch();
    if constexpr (kHalf == 0) {
      wait_for(kDout, phase);
      wait_for(kValue, phase);
    }
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss<Element, Tile, Tile, Config::kHeadDim>(gradients, rows_of(0, 1) + own_rows, keys_of(0, 1) + keys,
                                                             false);
    ptx::warpgroup_commit_batch();
    ptx::warpgroup_wait<1>();
    ptx::warpgroup_fence_operand(scores);
    tile.template make_probabilities<kFirst>(scores, 0);
    pack_left<Element>(packed, scores);
    if constexpr (kHalf == 0) Roles::take_turn(Roles::consumer_group()); // the products of the step before have read dS
    store_left<Left>(packed, ptx::shared_address(shared.sScores[0]), 16 * warp(), 8 * kFirst);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_fence_operand(gradients);
    tile.template make_gradients<kFirst>(scores, gradients, 0);
    pack_left<Element>(packed, gradients);
#pragma unroll
    for (int k = 0; k < kCount / 2; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) ds[kFirst / 2 + k][i] = packed[k][i];
  }
  __device__ void wait_for(FusedOperand operand, uint32_t phase) const {
    Roles::consumer_wait(shared.full[operand], phase);
  }
  __device__ void release(FusedOperand operand) const { Roles::consumer_release(shared.empty[operand]); }

  __device__ void run(const DenseFusedTask &task) {
    tile.start(task);
    for (int64_t index = task.first; index < task.past; ++index, ++state) {
      if constexpr (Config::kInTurn) {
        step_in_turn(state.phase);
      } else {
        Roles::consumer_wait(shared.full[state.index], state.phase);
        step(state.index);
      }
    }
    tile.write_dbias();
  }

  __device__ void run() {
    Roles::pass_turn(Roles::consumer_group());
    DenseFusedTask::for_each(work, [&](const DenseFusedTask &next) { run(next); });
    Roles::take_turn(Roles::consumer_group()); // the last turn that was passed on
  }
};

template <class Config>
__global__ void __launch_bounds__(Roles::kThreads, 1) dense_fused_kernel(const __grid_constant__ DenseBackward work) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  ptx::wait_for_kernel_ahead();
  ptx::start_dependents();
  if (*work.odd) return;
  auto &shared = *reinterpret_cast<DenseFusedShared<Config> *>(dynamic_shared);
  shared.init();
  __syncthreads();
  using Registers = std::conditional_t<Config::kFolds, RoleRegisters<216, 72>, RoleRegisters<224, 56>>;
  if (Roles::is_producer()) {
    Registers::produce();
    PipelineState<Config::kStages> state;
    DenseFusedTask::for_each(
        work, [&](const DenseFusedTask &task) { DenseFusedProducer<Config>(work, shared, task).run(state); });
  } else {
    Registers::consume();
    DenseFusedConsumer<Config>(work, shared).run();
  }
}

} // namespace fdm::cuda
