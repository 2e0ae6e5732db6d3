// SPDX-License-Identifier: BSD-3-Clause
// All gradients with a pair bias in one kernel, with Hopper's wgmma. A tile of 128 x 128 scores stays with a thread
// block while it loops over the sources of its bias, and the tile of dbias stays in registers.
//
// Two consumer warpgroups have 64 rows each. Each computes S = Q K', P = exp(S - lse), dP = dO V' and
// dS = P (dP - delta) of its rows. P and dS then go to shared memory, because dV = P' dO and dK = dS' Q sum over the
// rows of both warpgroups. Each computes 64 keys of dV and dK. dQ, dK and dV are sums over the tiles of several
// blocks, so they are added to float32 sums in global memory, in no fixed order, unless another epilogue can complete
// them (FusedEpilogue). So is a tile of dbias if several blocks share its sources. With small tiles a warpgroup has a
// source of its own, and shares nothing with the other.
//
// The kernel is persistent: while the results of a tile are written, the producer copies the first rows of the next.
//
// The kernel does not test for rare cases. NaN, inf and very large numbers in dropped pairs make sums non-finite.
// This is found when the sums are rounded or written; the kernels of fixed order then compute all gradients.
#pragma once

#include "../../tile/sm90/products.cuh"
#include "fused_epilogues.cuh"
#include "fused_producer.cuh"
#include "fused_tile.cuh"
#include "ptx/dependent.cuh"

namespace fdm::cuda {

template <class Config> struct PairBiasFusedConsumer {
  using Element = typename Config::Element;
  using Pair = typename Config::Pair;
  using Tile = typename Pair::Tile;
  using Left = typename Config::Scores;
  static constexpr int kTiles = Config::kSourceTile / 8;
  using Scores = float[kTiles][4];
  using Packed = uint32_t[kTiles / 2][4];
  using Sums = typename FusedProducts<Config>::Sums;
  static constexpr int kFullBarrier = 4, kReadBarrier = 5; // of P and dS; with small tiles, one per warpgroup
  // Threads that share P and dS.
  static constexpr int kSourceThreads = Roles::kConsumerThreads / Config::kSources;

  const PairBiasBackward &work;
  PairBiasFusedShared<Config> &shared;
  FusedBiasTile<Config> tile;
  typename Config::Epilogue epilogue;
  PipelineState<Config::kStages> state;

  __device__ PairBiasFusedConsumer(const PairBiasBackward &own_work, PairBiasFusedShared<Config> &memory)
      : work(own_work), shared(memory), tile(own_work, memory), epilogue(own_work, memory) {}

  __device__ static int warp() { return threadIdx.x / 32; }
  __device__ static int group() { return Roles::consumer_group(); }
  __device__ static int own_source() { return Config::kSmallTiles ? group() : 0; }

  __device__ static void sync() { ptx::sync_threads<kSourceThreads>(kFullBarrier + own_source()); }
  // The warpgroups write P and dS in turns, once the products of the step before have read them. With small tiles they
  // share neither, so they take no turns.
  __device__ static void take_turn() {
    if constexpr (!Config::kSmallTiles) Roles::take_turn(group());
  }
  __device__ static void pass_turn() {
    if constexpr (Config::kSmallTiles)
      sync();
    else
      Roles::pass_turn(group());
  }

  __device__ void store(const Packed &packed, int which) const {
    store_left<Left>(packed, ptx::shared_address(shared.sScores[which]), 16 * warp(), 0);
  }

  // These are of this warpgroup's source. `which` selects the first or second tensor of a pair.
  __device__ static uint64_t own_part() { return Tile::offset(Config::kSourceTile, 0) * own_source(); }
  __device__ uint64_t rows_of(int stage, int which) const {
    return Pair::descriptor(ptx::shared_address(shared.sRows[stage]), which) + own_part();
  }
  __device__ uint64_t keys_of(int stage, int which) const {
    return Pair::descriptor(ptx::shared_address(shared.sKeys[stage]), which) + own_part();
  }
  // P or dS of this warpgroup's keys.
  __device__ uint64_t scores_of(int which) const {
    return Left::descriptor(ptx::shared_address(shared.sScores[which])) +
           (Config::kSmallTiles ? Left::offset(Config::kSourceTile, 0) : Left::offset(0, 64)) * group();
  }

  // Starts S = Q K' (`which` is 0) or dP = dO V' of this warpgroup's rows.
  __device__ void start_scores(Scores &products, int stage, int which) const {
    const uint64_t own_rows = Config::kSmallTiles ? 0 : Tile::offset(64, 0) * group();
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss<Element, Tile, Tile, Config::kHeadDim>(products, rows_of(stage, which) + own_rows,
                                                             keys_of(stage, which), false);
    if constexpr (Config::kFolds) {
      const uint64_t left =
                         which == 0 ? shared.known.shifts_of(stage, group()) : shared.known.deltas_of(stage, group()),
                     right = which == 0 ? shared.known.keys_of(stage, Config::kSourceTile * own_source())
                                        : shared.known.ones_descriptor();
      ptx::wgmma_ss<Element, ptx::Major::k, ptx::Major::k>(products, left, right, true);
    }
    ptx::warpgroup_commit_batch();
  }

  // Computes dV = P' dO and dK = dS' Q of this warpgroup's keys, and dQ = dS K of its rows.
  __device__ void multiply_gradients(FusedProducts<Config> &sums, Packed &own_ds, int stage) const {
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss_columns<Element, Left, ptx::Major::mn, Tile, Config::kSourceTile>(sums.dv, scores_of(0),
                                                                                        rows_of(stage, 1), false);
    warpgroup_gemm_ss_columns<Element, Left, ptx::Major::mn, Tile, Config::kSourceTile>(sums.dk, scores_of(1),
                                                                                        rows_of(stage, 0), false);
    warpgroup_gemm_rs<Element, Tile>(sums.dq, own_ds, keys_of(stage, 0), false);
    ptx::warpgroup_commit_batch();
    ptx::warpgroup_wait<0>(sums.dq, sums.dk, sums.dv, own_ds);
  }

  // Computes the products of a step: this block's part of dq, dk and dv.
  __device__ void make_products(FusedProducts<Config> &sums, int stage) {
    Scores scores, gradients;
    Packed packed;
    start_scores(scores, stage, 0);
    start_scores(gradients, stage, 1);
    ptx::warpgroup_wait<1>(scores);
    tile.template make_probabilities<0>(scores, stage);
    pack_left<Element>(packed, scores);
    take_turn();
    store(packed, 0);
    ptx::warpgroup_wait<0>(gradients);
    tile.template make_gradients<0>(scores, gradients, stage);
    pack_left<Element>(packed, gradients);
    store(packed, 1);
    ptx::fence_async_proxy();
    sync();
    multiply_gradients(sums, packed, stage);
    pass_turn();
  }

  // A step if kInTurn. Registers hold the results of two products of 128 columns at a time. Shared memory has one
  // tile for P and dS, and one of each operand. Each operand is released once its last product has read it.
  __device__ void step_in_turn(uint32_t phase) {
    const uint64_t own_keys = scores_of(0),
                   own_rows = Left::descriptor(ptx::shared_address(shared.sScores[0])) + Left::offset(64, 0) * group();
    const int first_key = tile.task.key_tile * kPairBiasTileSm90;
    Packed ds;
    wait_for(kQuery, phase);
    wait_for(kKey, phase);
    const auto place = shared.places[0];
    make_half<0>(ds, phase);
    make_half<1>(ds, phase);
    release(kValue);
    ptx::fence_async_proxy();
    sync();
    Sums dv, dk, dq;
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss_columns<Element, Left, ptx::Major::mn, Tile, Config::kTile>(dv, own_keys, rows_of(0, 1), false);
    ptx::warpgroup_commit_batch();
    ptx::warpgroup_wait<0>(dv);
    release(kDout);
    ptx::sync_threads<kReadBarrier, Roles::kConsumerThreads>(); // all have read P
    store(ds, 0);
    ptx::fence_async_proxy();
    sync();
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss_columns<Element, Left, ptx::Major::mn, Tile, Config::kTile>(dk, own_keys, rows_of(0, 0), false);
    ptx::warpgroup_commit_batch();
    epilogue.add(work.fused.dv, place.dv, first_key, dv);
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss_columns<Element, Left, ptx::Major::k, Tile, Config::kTile>(dq, own_rows, keys_of(0, 0), false);
    ptx::warpgroup_commit_batch();
    ptx::warpgroup_wait<1>(dk);
    release(kQuery);
    epilogue.add(work.fused.dk, place.dk, first_key, dk);
    ptx::warpgroup_wait<0>(dq);
    release(kKey);
    pass_turn();
    epilogue.add(work.fused.dq, place.dq, tile.task.row_tile * kPairBiasTileSm90, dq);
  }

  // Stores P of 64 keys, and packs their dS.
  template <int kHalf> __device__ void make_half(Packed &ds, uint32_t phase) {
    constexpr int kTileCount = kTiles / 2, kFirst = kHalf * kTileCount;
    const uint64_t own_rows = Tile::offset(64, 0) * group(), keys = Tile::offset(8 * kFirst, 0);
    float scores[kTileCount][4], gradients[kTileCount][4];
    uint32_t packed[kTileCount / 2][4];
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
    ptx::warpgroup_wait<1>(scores);
    tile.template make_probabilities<kFirst>(scores, 0);
    pack_left<Element>(packed, scores);
    if constexpr (kHalf == 0) take_turn(); // the products of the step before have read dS
    store_left<Left>(packed, ptx::shared_address(shared.sScores[0]), 16 * warp(), 8 * kFirst);
    ptx::warpgroup_wait<0>(gradients);
    tile.template make_gradients<kFirst>(scores, gradients, 0);
    pack_left<Element>(packed, gradients);
#pragma unroll
    for (int k = 0; k < kTileCount / 2; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) ds[kFirst / 2 + k][i] = packed[k][i];
  }
  __device__ void wait_for(FusedOperand operand, uint32_t phase) const {
    Roles::consumer_wait(shared.full[operand], phase);
  }
  __device__ void release(FusedOperand operand) const { Roles::consumer_release(shared.empty[operand]); }

  __device__ void run(const PairBiasFusedTask &task) {
    tile.start(task);
    SourceWalk source(work.call, task.plane, task.first + own_source());
    for (int64_t index = task.first; index < task.past; index += Config::kSources, ++state) {
      if constexpr (Config::kInTurn) {
        step_in_turn(state.phase);
      } else {
        Roles::consumer_wait(shared.full[state.index], state.phase);
        FusedProducts<Config> sums;
        make_products(sums, state.index);
        epilogue.finish(task, sums, state.index, source, index + own_source() < task.past);
      }
#pragma unroll
      for (int n = 0; n < Config::kSources; ++n) ++source;
    }
    tile.write_dbias();
  }

  __device__ void run() {
    if constexpr (!Config::kSmallTiles) pass_turn();
    PairBiasFusedTask::for_each<Config::kCluster>(work, [&](const PairBiasFusedTask &next) { run(next); });
    take_turn(); // takes the last turn that was passed on
  }
};

template <class Config>
__global__ void __launch_bounds__(Roles::kThreads, 1)
    pair_bias_fused_kernel(const __grid_constant__ PairBiasBackward work) {
  auto &shared = dynamic_memory<PairBiasFusedShared<Config>>();
  shared.init();
  ptx::wait_for_kernel_ahead();
  ptx::start_dependents();
  // Another thread block may set non_finite concurrently, so the value that one thread reads holds for all.
  if (!shared.exchange.agree(*work.non_finite != 0)) {
    if (Roles::is_producer()) {
      Config::Registers::produce();
      PipelineState<Config::kStages> state;
      PairBiasFusedTask::for_each<Config::kCluster>(
          work, [&](const PairBiasFusedTask &task) { PairBiasFusedProducer<Config>(work, shared, task).run(state); });
    } else {
      Config::Registers::consume();
      PairBiasFusedConsumer<Config>(work, shared).run();
    }
  }
  shared.exchange.leave();
}

} // namespace fdm::cuda
