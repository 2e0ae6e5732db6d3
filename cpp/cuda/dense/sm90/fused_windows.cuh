// SPDX-License-Identifier: BSD-3-Clause
// All gradients of problems with at most 64 rows and keys, whose batch shares a bias: windows. It is fused.cuh where a
// consumer warpgroup has a source of its own, so it shares nothing with the other, and dQ, dK and dV are complete: they
// are written as they are. Only the bias has its gradient summed over blocks of threads, in no fixed order.
#pragma once

#include "../../tile/sm90/products.cuh"
#include "complete_rows.cuh"
#include "fused_producer.cuh"
#include "fused_tile.cuh"

namespace fdm::cuda {

template <class Config> struct WindowConsumer {
  using Element = typename Config::Element;
  using Pair = typename Config::Pair;
  using Tile = typename Pair::Tile;
  using Left = typename Config::Scores;
  static_assert(Config::kFolds && Config::kSide == 64);
  static constexpr int kTiles = Config::kSide / 8, kOutTiles = Config::kHeadDim / 8, kDepth = Config::kSide / 16;
  using Scores = float[kTiles][4];
  using Sums = float[kOutTiles][4];
  static constexpr int kGroupThreads = Roles::kConsumerThreads / Roles::kConsumerGroups;
  static constexpr int kGroupBarrier = 4; // and the next: one for each warpgroup

  const DenseBackward &work;
  DenseFusedShared<Config> &shared;
  FusedBiasTile<Config> tile;
  PipelineState<Config::kStages> state;

  __device__ WindowConsumer(const DenseBackward &own_work, DenseFusedShared<Config> &memory)
      : work(own_work), shared(memory), tile(own_work, memory) {}

  __device__ static int warp() { return threadIdx.x / 32; }
  __device__ static void sync_group() { ptx::sync_threads<kGroupThreads>(kGroupBarrier + Roles::consumer_group()); }

  // Operands of this warpgroup's source: the first or second of each pair.
  __device__ static uint64_t own_part() { return Tile::offset(Config::kSide, 0) * Roles::consumer_group(); }
  __device__ uint64_t rows_of(int stage, int which) const {
    return Pair::descriptor(ptx::shared_address(shared.sRows[stage]), which) + own_part();
  }
  __device__ uint64_t keys_of(int stage, int which) const {
    return Pair::descriptor(ptx::shared_address(shared.sKeys[stage]), which) + own_part();
  }
  // P or dS.
  __device__ uint64_t scores_of(int which) const {
    return Left::descriptor(ptx::shared_address(shared.sScores[which])) +
           Left::offset(Config::kSide, 0) * Roles::consumer_group();
  }
  __device__ void store(const uint32_t (&packed)[kDepth][4], int which) const {
    store_left<Left>(packed, ptx::shared_address(shared.sScores[which]), 16 * warp(), 0);
  }

  // Starts S = Q K' or dP = dO V'.
  __device__ void start_scores(Scores &products, int stage, int which) const {
    const int group = Roles::consumer_group();
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss<Element, Tile, Tile, Config::kHeadDim>(products, rows_of(stage, which), keys_of(stage, which),
                                                             false);
    const uint64_t left = which == 0 ? shared.known.shifts_of(stage, group) : shared.known.deltas_of(stage, group),
                   right =
                       which == 0 ? shared.known.keys_of(stage, Config::kSide * group) : shared.known.ones_descriptor();
    ptx::wgmma_ss<Element, false, false>(products, left, right, true);
    ptx::warpgroup_commit_batch();
  }

  __device__ void step(int stage, const SourceWalk &source, bool exists) {
    Scores scores, gradients;
    uint32_t packed[kDepth][4];
    start_scores(scores, stage, 0);
    start_scores(gradients, stage, 1);
    ptx::warpgroup_wait<1>();
    ptx::warpgroup_fence_operand(scores);
    tile.template make_probabilities<0>(scores, stage);
    pack_left<Element>(packed, scores);
    store(packed, 0); // all warps of the group have read what the step before stored
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_fence_operand(gradients);
    tile.template make_gradients<0>(scores, gradients, stage);
    pack_left<Element>(packed, gradients);
    store(packed, 1);
    ptx::fence_async_proxy();
    sync_group();
    Sums dq, dk, dv;
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss_columns<Element, Left, true, Tile, Config::kSide>(dv, scores_of(0), rows_of(stage, 1), false);
    warpgroup_gemm_ss_columns<Element, Left, true, Tile, Config::kSide>(dk, scores_of(1), rows_of(stage, 0), false);
    warpgroup_gemm_rs<Element, Tile>(dq, packed, keys_of(stage, 0), false);
    ptx::warpgroup_commit_batch();
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_fence_operand(dv);
    ptx::warpgroup_fence_operand(dk);
    ptx::warpgroup_fence_operand(dq);
    ptx::warpgroup_fence_operand(packed);
    Roles::consumer_release(shared.empty[stage]);
    sync_group();
    const fdm_problem &p = work.call.p;
    float probe = 0.0f;
    write(work.a.dq, source, exists ? p.queries : 0, dq, p.scale, probe);
    write(work.a.dk, source, exists ? p.keys : 0, dk, p.scale, probe);
    write(work.a.dv, source, exists ? p.keys : 0, dv, 1.0f, probe);
    if (probe != 0.0f) *work.odd = 1;
  }

  // Writes a gradient, times a factor.
  __device__ static void write(const fdm_tensor &t, const SourceWalk &source, int64_t rows, const Sums &sums,
                               float factor, float &probe) {
    if (!present(t)) return;
    auto *const first = static_cast<Element *>(t.data) + source.batch * t.stride[0] + source.head * t.stride[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * FusedBiasTile<Config>::band() + accumulator_row(half);
      float own[kOutTiles][2];
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
        own[n][0] = sums[n][2 * half];
        own[n][1] = sums[n][2 * half + 1];
      }
      write_complete_row(first + row * t.stride[1], row < rows, int(t.shape[3]), own, factor, probe);
    }
  }

  __device__ void run(const DenseFusedTask &task) {
    tile.start(task);
    const int group = Roles::consumer_group();
    SourceWalk source(work.call, task.unit, task.first + group);
    for (int64_t index = task.first; index < task.past; index += Config::kSources, ++state) {
      Roles::consumer_wait(shared.full[state.index], state.phase);
      step(state.index, source, index + group < task.past);
#pragma unroll
      for (int n = 0; n < Config::kSources; ++n) ++source;
    }
    tile.write_dbias();
  }
};

template <class Config>
__global__ void __launch_bounds__(Roles::kThreads, 1) dense_windows_kernel(const __grid_constant__ DenseBackward work) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto &shared = *reinterpret_cast<DenseFusedShared<Config> *>(dynamic_shared);
  shared.init();
  // Another block of threads may find something odd meanwhile: what one thread has seen goes for all.
  if (__syncthreads_or(*work.odd != 0)) return;
  using Registers = RoleRegisters<208, 80>;
  if (Roles::is_producer()) {
    Registers::produce();
    PipelineState<Config::kStages> state;
    DenseFusedTask::for_each(
        work, [&](const DenseFusedTask &task) { DenseFusedProducer<Config>(work, shared, task).run(state); });
  } else {
    Registers::consume();
    WindowConsumer<Config> consumer(work, shared);
    DenseFusedTask::for_each(work, [&](const DenseFusedTask &task) { consumer.run(task); });
  }
}

} // namespace fdm::cuda
