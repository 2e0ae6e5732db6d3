// SPDX-License-Identifier: BSD-3-Clause
// All gradients of problems with at most two tiles of rows and two of keys. It is fused.cuh where a cluster has all tiles of
// a head, so that its blocks of threads can complete dQ, dK and dV among themselves, and nothing is added in global memory
// but the tiles of dbias whose sources several clusters share.
//
// A step makes the same products in all blocks. Two blocks with the same rows then exchange halves of their parts of dQ, two
// with the same keys those of dK and dV: of the two rows that a thread's accumulators have, each block completes one. Warps
// exchange with the same warp of the other block, through the memory of P and dS, once no product of that block reads it.
#pragma once

#include "complete_rows.cuh"
#include "fused.cuh"
#include "ptx/cluster.cuh"

namespace fdm::cuda {

template <class Config> struct DenseClusterConsumer {
  using Element = typename Config::Element;
  using Fused = DenseFusedConsumer<Config>;
  using Sums = typename Fused::Sums;
  static constexpr int kOutTiles = Fused::kOutTiles;
  using Half = float[kOutTiles][2]; // one of the two rows of accumulators

  const DenseBackward &work;
  DenseFusedShared<Config> &shared;
  Fused fused;
  const int row_tile, key_tile; // this block's
  uint32_t phase = 0;

  __device__ DenseClusterConsumer(const DenseBackward &own_work, DenseFusedShared<Config> &memory)
      : work(own_work), shared(memory), fused(own_work, memory), row_tile(int(blockIdx.y) / own_work.fused.key_tiles),
        key_tile(int(blockIdx.y) % own_work.fused.key_tiles) {}

  // Whether there is another block on an axis. Below: its rank, and which row of accumulators this one completes.
  __device__ bool has_other(ClusterAxis axis) const {
    return (axis == kSameRows ? work.fused.key_tiles : work.fused.row_tiles) > 1;
  }
  __device__ uint32_t other(ClusterAxis axis) const {
    return uint32_t(axis == kSameRows ? row_tile * work.fused.key_tiles + 1 - key_tile
                                      : (1 - row_tile) * work.fused.key_tiles + key_tile);
  }
  __device__ int own_half(ClusterAxis axis) const { return axis == kSameRows ? key_tile : row_tile; }

  // The memory of this warp's rows of P or dS, in panels of 64 columns: room for rows of one gradient.
  __device__ float *room(int gradient) const {
    using Scores = typename Config::Scores;
    constexpr int kPanelBytes = Scores::kBytes / 2, kWarpBytes = kPanelBytes / Roles::kConsumerWarps;
    static_assert(kOutTiles * 2 * int(sizeof(float)) * 32 <= kWarpBytes && Config::kScoreTiles == 2);
    char *const panel = shared.sScores[gradient / 2] + gradient % 2 * kPanelBytes;
    return reinterpret_cast<float *>(panel + Fused::warp() * kWarpBytes) + Fused::lane() * 4;
  }

  __device__ static void take_half(Half &x, const Sums &sums, int half) {
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) x[n][i] = half ? sums[n][2 + i] : sums[n][i];
  }
  __device__ void send(ClusterAxis axis, int gradient, const Sums &sums) const {
    Half x;
    take_half(x, sums, 1 - own_half(axis));
    const ptx::RoomOfBlock there(room(gradient), shared.exchange.readable[axis][Fused::warp()], other(axis));
#pragma unroll
    for (int n = 0; n < kOutTiles; n += 2)
      there.store(n / 2 * 128, make_float4(x[n][0], x[n][1], x[n + 1][0], x[n + 1][1]));
  }
  // Completes a row with what the other block has sent.
  __device__ void receive(Half &x, int gradient) const {
#pragma unroll
    for (int n = 0; n < kOutTiles; n += 2) {
      const float4 part = *reinterpret_cast<const float4 *>(room(gradient) + n / 2 * 128);
      x[n][0] += part.x;
      x[n][1] += part.y;
      x[n + 1][0] += part.z;
      x[n + 1][1] += part.w;
    }
  }

  // Writes this warp's rows of a gradient, in a tile of queries or keys, times a factor.
  __device__ void write(ClusterAxis axis, int gradient, const fdm_tensor &t, const SourceWalk &source, int tile,
                        const Sums &sums, float factor, float &probe) const {
    if (!present(t)) return;
    const bool shares = has_other(axis);
    auto *const head = static_cast<Element *>(t.data) + source.batch * t.stride[0] + source.head * t.stride[2];
    const int first = tile * kWideTile + 16 * Fused::warp();
    const auto write_half = [&](int half) {
      Half x;
      take_half(x, sums, half);
      if (shares) receive(x, gradient);
      const int64_t row = first + accumulator_row(half);
      write_complete_row(head + row * t.stride[1], row < t.shape[1], int(t.shape[3]), x, factor, probe);
    };
    if (shares) return write_half(own_half(axis));
    write_half(0);
    write_half(1);
  }

  // Sends the other blocks their halves, and waits until this warp has its own. No product reads P and dS any more.
  __device__ void exchange(const typename Fused::Products &sums) {
    constexpr uint32_t kGradientBytes = 32 * sizeof(Half);
    auto &barriers = shared.exchange;
    const int warp = Fused::warp();
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kClusterAxes; ++n) {
      const auto axis = ClusterAxis(n);
      if (!has_other(axis) || Fused::lane() > 0) continue;
      ptx::expect_of_cluster(barriers.readable[axis][warp], axis == kSameRows ? kGradientBytes : 2 * kGradientBytes);
      ptx::arrive_of_block(barriers.writable[axis], other(axis));
    }
    if (has_other(kSameRows)) {
      ptx::wait_for_cluster(barriers.writable[kSameRows], phase);
      send(kSameRows, 0, sums.dq);
    }
    if (has_other(kSameKeys)) {
      ptx::wait_for_cluster(barriers.writable[kSameKeys], phase);
      send(kSameKeys, 1, sums.dk);
      send(kSameKeys, 2, sums.dv);
    }
#pragma unroll
    for (int n = 0; n < kClusterAxes; ++n)
      if (has_other(ClusterAxis(n))) ptx::wait_for_cluster(barriers.readable[n][warp], phase);
    phase ^= 1;
  }

  __device__ void run(const DenseFusedTask &task) {
    fused.tile.start(task);
    SourceWalk source(work.call, task.unit, task.first);
    auto &state = fused.state;
    for (int64_t index = task.first; index < task.past; ++index, ++state, ++source) {
      Roles::consumer_wait(shared.full[state.index], state.phase);
      typename Fused::Products sums;
      fused.make_products(sums, state.index);
      Roles::consumer_release(shared.empty[state.index]);
      exchange(sums);
      const float scale = work.call.p.scale;
      float probe = 0.0f;
      write(kSameRows, 0, work.a.dq, source, row_tile, sums.dq, scale, probe);
      write(kSameKeys, 1, work.a.dk, source, key_tile, sums.dk, scale, probe);
      write(kSameKeys, 2, work.a.dv, source, key_tile, sums.dv, 1.0f, probe);
      if (probe != 0.0f) *work.odd = 1;
      __syncwarp(); // all lanes have read what the next step's P and dS overwrite
    }
    fused.tile.write_dbias();
  }

  __device__ void run() {
    Roles::pass_turn(Roles::consumer_group());
    DenseFusedTask::for_each_of_cluster(work, [&](const DenseFusedTask &next) { run(next); });
    Roles::take_turn(Roles::consumer_group()); // the last turn that was passed on
  }
};

template <class Config>
__global__ void __launch_bounds__(Roles::kThreads, 1)
    dense_clusters_kernel(const __grid_constant__ DenseBackward work) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto &shared = *reinterpret_cast<DenseFusedShared<Config> *>(dynamic_shared);
  shared.init();
  if (threadIdx.x == 0) shared.exchange.odd = *work.odd != 0;
  __syncthreads();
  // Another cluster may find something odd meanwhile: what one thread has seen goes for all.
  const bool has_others = gridDim.y > 1;
  if (has_others) ptx::sync_cluster();
  const bool odd = (has_others ? ptx::load_of_block(&shared.exchange.odd, 0) : shared.exchange.odd) != 0.0f;
  if (!odd) {
    using Registers = std::conditional_t<Config::kFolds, RoleRegisters<216, 72>, RoleRegisters<224, 56>>;
    if (Roles::is_producer()) {
      Registers::produce();
      PipelineState<Config::kStages> state;
      DenseFusedTask::for_each_of_cluster(
          work, [&](const DenseFusedTask &task) { DenseFusedProducer<Config>(work, shared, task).run(state); });
    } else {
      Registers::consume();
      DenseClusterConsumer<Config>(work, shared).run();
    }
  }
  if (has_others) ptx::leave_cluster();
}

} // namespace fdm::cuda
