// SPDX-License-Identifier: BSD-3-Clause
// Forward pass with wgmma (Hopper): a persistent kernel with one thread block per SM.
//
// The kernel is warp-specialized. Lookup warps find tiles and the keys of their columns. A producer warpgroup gathers
// the rows of Q, K and V as far ahead as the pipeline stages allow, also across tiles. If the columns are consecutive
// keys, one warp copies TMA boxes instead (forward_boxes.cuh). The consumers are in forward_consumer.cuh.
#pragma once

#include "../../tile/sm90/block_lookup.cuh"
#include "../../tile/sm90/key_lookup.cuh"
#include "../../tile/sm90/tile_sizes.cuh"
#include "forward_consumer.cuh"
#include "ptx/dependent.cuh"
#include "ptx/registers.cuh"

namespace fdm::cuda {

// Prefetches Q of the next tile to L2, by kThreads lookup threads. Q is loaded only when its stage becomes empty, and
// should then be in L2.
template <class Config, int kThreads>
__device__ void prefetch_queries(const ForwardParams &params, const ForwardTask &next) {
  const fdm_tensor &q = params.p.q;
#pragma unroll 1
  for (int r = threadIdx.x % kThreads; r < Config::kRows; r += kThreads) {
    const int64_t i = next.first_row + r;
    if (i >= next.s.q_count) return;
    const auto *row = static_cast<const uint16_t *>(q.data) + row_offset(q, next.s, i, next.head);
    for (int d = 0; d < params.p.head_dim; d += 64) ptx::prefetch_l2(row + d);
  }
}

// Loads Q of a task, kColumns rows at a time. A thread then needs no more registers than for a block of K.
template <class Config>
__device__ void load_queries(const ForwardParams &params, const typename Config::Loader &tasks, char *sQ) {
  using QTile = typename Config::QTile;
  constexpr int kRows = Config::kColumns;
  using Gather = RowGather<QTile, kRows>;
  const fdm_tensor &q = params.p.q;
#pragma unroll 1
  for (int row = 0; row < Config::kRows; row += kRows) {
    const ForwardTask &task = tasks.current();
    const auto *first = static_cast<const uint16_t *>(q.data) + row_offset(q, task.s, task.first_row + row, task.head);
    const int64_t rows = min64(task.s.q_count - task.first_row - row, kRows);
    const auto sources = Gather::consecutive(reinterpret_cast<const char *>(first), params.rows.q_bytes, int(rows));
    if (row == 0) tasks.producer_acquire();
    // Without opaque_here(), derived addresses take registers throughout the loop over tiles.
    const uint32_t tile = ptx::opaque_here(ptx::shared_address(sQ) + row * QTile::kRowBytes);
    Gather::copy(tile, sources, int(params.p.head_dim));
  }
}

// All lookup threads look up each block.
template <class Config>
__device__ void look_up_together(const ForwardParams &params, ForwardSharedSm90<Config> &shared) {
  const auto maker = forward_task_maker(params, shared);
  LookupTasks scheduler(maker);
  const BiasStore<Config> on_column{params, shared};
  KeyLookup<typename Config::Pipeline, BiasStore<Config>> keys(params.p, shared.pipeline, params.rows, on_column);
  keys.start(scheduler.current());
  for (; !scheduler.at_end(); scheduler.advance()) {
    keys.run(scheduler, [&] {
      prefetch_queries<Config, Roles::kLookupThreads>(params, scheduler.next());
      if (!scheduler.prepares()) return;
      keys.park();
      scheduler.prepare_ahead();
      keys.unpark();
    });
  }
}

// Lookup warps take turns at blocks, and one more warp makes tasks.
template <class Config>
__device__ void look_up_in_turns(const ForwardParams &params, ForwardSharedSm90<Config> &shared) {
  const int warp = Roles::lookup_warp();
  if (warp == Roles::kMaxTurnWarps) {
    make_tasks(forward_task_maker(params, shared),
               [&](const ForwardTask &task) { prefetch_queries<Config, 32>(params, task); });
  } else if (warp < Config::Pipeline::kTurnWarps) {
    const BiasStore<Config> on_column{params, shared};
    BlockLookup<typename Config::Pipeline, BiasStore<Config>> keys(params.p, shared.pipeline, params.rows, on_column,
                                                                   warp);
    look_up_tasks(shared.tasks, [&](const ForwardTask &task) { keys.run(task); });
  }
}

template <class Config>
__device__ void produce_forward(const ForwardParams &params, ForwardSharedSm90<Config> &shared) {
  using Pipeline = typename Config::Pipeline;
  const fdm_problem &p = params.p;
  typename Config::Loader tasks(shared.tasks);
  KeyGatherer<Pipeline> keys(shared.pipeline, p, params.rows);
  for (; tasks.wait(); tasks.advance()) {
    const ForwardTask &task = tasks.current();
    const char *first_k = RowPlaces::rows(p, p.k, params.rows.k_bytes, task.s, task.kv_head).first;
    // Read from shared memory each time, so that the number of blocks takes no register.
    const auto blocks = [&] { return (tasks.current().columns.count + Config::kColumns - 1) / Config::kColumns; };
#pragma unroll 1
    for (int block = 0; block == 0 || block < blocks(); ++block) {
      keys.load(first_k, block < blocks());
      if (block > 0) continue;
      // K of the first block does not wait for an empty stage of Q.
      keys.first_v = RowPlaces::rows(p, p.v, params.rows.v_bytes, task.s, task.kv_head).first;
      load_queries<Config>(params, tasks, shared.sQ[tasks.stage()]);
      tasks.producer_commit();
    }
  }
  keys.load(nullptr, false);
  tasks.producer_tail();
}

// Columns whose keys are in a plan.
template <class ConfigType> struct GatheredColumns {
  using Config = ConfigType;
  using Params = ForwardParams;
  using Registers = ForwardRegisters<Config::kHeadDim>;

  __device__ static const ForwardParams &forward(const ForwardParams &params) { return params; }
  __device__ static void look_up(const ForwardParams &params, ForwardSharedSm90<Config> &shared) {
    if constexpr (Config::Pipeline::kLookup == Lookup::warps)
      look_up_in_turns<Config>(params, shared);
    else
      look_up_together<Config>(params, shared);
  }
  __device__ static void produce(const ForwardParams &params, ForwardSharedSm90<Config> &shared) {
    produce_forward<Config>(params, shared);
  }
};

// The forward kernel with the lookup and producer warps of GatheredColumns, of BoxColumns (forward_boxes.cuh), or of
// ListedColumns (lists/sm90/forward.cuh).
template <class Columns>
__global__ void __launch_bounds__(Roles::kThreadsWithLookup, 1)
    forward_kernel_sm90(const __grid_constant__ typename Columns::Params params) {
  using Config = typename Columns::Config;
  using Registers = typename Columns::Registers;
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto &shared = *reinterpret_cast<ForwardSharedSm90<Config> *>(dynamic_shared);
  shared.init();
  ptx::wait_for_kernel_ahead();
  __syncthreads();
  if (Roles::is_lookup()) {
    Registers::look_up();
    Columns::look_up(params, shared);
  } else if (Roles::is_producer()) {
    Registers::produce();
    Columns::produce(params, shared);
  } else {
    Registers::consume();
    ForwardConsumer<Config> consumer(Columns::forward(params), shared);
    consumer.run();
  }
}

} // namespace fdm::cuda
