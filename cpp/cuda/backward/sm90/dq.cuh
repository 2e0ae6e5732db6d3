// SPDX-License-Identifier: BSD-3-Clause
// The gradient of the queries with Hopper's wgmma. A persistent kernel with one thread block on each SM. A producer
// warpgroup loads, and consumer warpgroups compute.
//
// The product of dS with K starts after the next block's S and dP. So the tensor cores are busy while a warpgroup
// computes dS.
#pragma once

#include "../../tile/sm90/key_pipeline.cuh"
#include "../../tile/sm90/products.cuh"
#include "../../tile/sm90/task_ring.cuh"
#include "../dq_rows.cuh"
#include "ptx/dependent.cuh"

namespace fdm::cuda {

template <class ElementType, int kHeadDimension, int kColumnCount, int kStageCount> struct DqConfigSm90 {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kRows = kTileRows, kColumns = kColumnCount;
  using Pipeline = KeyPipeline<kHeadDim, kColumnCount, kStageCount, kStageCount>;
  using RowTile = SmemTile<kHeadDim, kRows>;
  using Rows = DqRows<Element, 1, kColumns / 8, kHeadDim, TileKind::usual>;
  static_assert(kRows == 64 * Roles::kConsumerGroups && kRows == Roles::kProducerThreads);
  // If true, Q is a left operand in registers. With both operands in shared memory, reads of it would be the
  // bottleneck.
  static constexpr bool kQueriesInRegisters = kHeadDim <= 128;
};

template <class Config> struct DqSharedSm90 {
  typename Config::Pipeline pipeline;
  alignas(1024) char sQ[Config::RowTile::kBytes];
  char sdO[Config::RowTile::kBytes];
  RowStatistics statistics[Config::kRows];
  TaskRing<DqTask> tasks;
};

// Rows without a gradient are loaded as zeros, so that non-finite values in their dO reach no result.
template <class Config>
__device__ void load_rows(const BackwardParams &params, const DqTask &task, const RowStatistics &statistics,
                          DqSharedSm90<Config> &shared) {
  const int thread = Roles::producer_thread();
  shared.statistics[thread] = statistics;
  const auto load = [&](const fdm_tensor &t, char *tile) {
    const uint16_t *row = kZeroRow;
    if (!statistics.empty())
      row = static_cast<const uint16_t *>(t.data) + row_offset(t, task.s, task.first_row + thread, task.head);
    Config::RowTile::template gather<Roles::kProducerWarps>(ptx::shared_address(tile), thread / 32, row,
                                                            int(params.p.head_dim));
  };
  load(params.p.q, shared.sQ);
  load(params.a.dout, shared.sdO);
}

template <class Config> __device__ void produce_dq(const BackwardParams &params, DqSharedSm90<Config> &shared) {
  const fdm_problem &p = params.p;
  const auto make_task = [&](const HeadTile &t, DqTask &task) {
    task = {t.s,
            t.sequence_index,
            t.head,
            kv_head_of(p, t.head),
            t.tile * Config::kRows,
            tile_columns(p, params.plan, t.s, t.sequence_index, t.head, t.tile),
            bias_view(p, t.s, t.sequence_index, t.head, t.tile)};
  };
  static_assert(Roles::kProducerWarps == Roles::kLookupWarps, "producers synchronize as lookup warps");
  uint32_t *const tickets = nullptr; // the order is fixed
  const TaskMaker<DqTask, decltype(make_task)> maker{p, params.order, tickets, shared.tasks, make_task};
  TaskLoader<DqTask> loader(shared.tasks);
  LookupTasks scheduler(maker);
  KeyProducer<typename Config::Pipeline> keys(p, shared.pipeline);
  keys.start(scheduler.current());
  for (; !scheduler.at_end(); scheduler.advance()) {
    const DqTask &task = scheduler.current(), &next = scheduler.next();
    const int64_t i = task.first_row + Roles::producer_thread();
    RowStatistics statistics{INFINITY, 0.0f};
    if (i < task.s.q_count) statistics = row_statistics(params, task.s, task.head, i);
    keys.begin(task, next);
    loader.producer_acquire();
    load_rows<Config>(params, task, statistics, shared);
    loader.producer_commit();
    keys.run(task, next, [&] {
      if (!scheduler.prepares()) return;
      keys.park();
      scheduler.prepare_ahead();
      keys.unpark();
    });
  }
  keys.finish();
  loader.producer_tail();
}

template <class Config> struct DqConsumer {
  using Element = typename Config::Element;
  using Pipeline = typename Config::Pipeline;
  using RowTile = typename Config::RowTile;
  using KeyTile = typename Pipeline::Tile;
  using Rows = typename Config::Rows;
  static constexpr int kColumns = Config::kColumns, kHeadDim = Config::kHeadDim;

  const BackwardParams &params;
  DqSharedSm90<Config> &shared;
  RingConsumer<DqTask> tasks;
  typename Pipeline::KPipelineState state; // K and V have the same stages
  uint64_t q_desc, dout_desc;
  uint32_t queries[Config::kQueriesInRegisters ? kHeadDim / 16 : 1][4];

  __device__ DqConsumer(const BackwardParams &parameters, DqSharedSm90<Config> &memory)
      : params(parameters), shared(memory), tasks(memory.tasks) {
    const uint64_t own_rows = RowTile::offset(64 * Roles::consumer_group(), 0);
    q_desc = RowTile::descriptor(ptx::shared_address(shared.sQ)) + own_rows;
    dout_desc = RowTile::descriptor(ptx::shared_address(shared.sdO)) + own_rows;
  }

  __device__ static uint64_t key_desc(const char *tile) { return KeyTile::descriptor(ptx::shared_address(tile)); }

  // Loads Q of this task into registers, if kQueriesInRegisters.
  __device__ void load_queries() {
    if constexpr (Config::kQueriesInRegisters)
      load_left<RowTile>(queries, ptx::shared_address(shared.sQ), int(threadIdx.x) / 32 * 16);
  }

  // Starts the products S and dP.
  __device__ void start_scores(Rows &rows) const {
    Pipeline &pipeline = shared.pipeline;
    Roles::consumer_wait(pipeline.k_full[state.index], state.phase);
    ptx::warpgroup_arrive();
    if constexpr (Config::kQueriesInRegisters)
      warpgroup_gemm_rs_transposed<Element, KeyTile>(rows.scores[0], queries, key_desc(pipeline.sK[state.index]));
    else
      warpgroup_gemm_ss<Element, RowTile, KeyTile, kHeadDim>(rows.scores[0], q_desc, key_desc(pipeline.sK[state.index]),
                                                             false);
    Roles::consumer_wait(pipeline.v_full[state.index], state.phase);
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss<Element, RowTile, KeyTile, kHeadDim>(rows.gradients[0], dout_desc,
                                                           key_desc(pipeline.sV[state.index]), false);
    ptx::warpgroup_commit_batch();
  }

  __device__ void start_dq(Rows &rows, const uint32_t (&gradients)[kColumns / 16][4], int stage) const {
    ptx::warpgroup_arrive();
    warpgroup_gemm_rs<Element, KeyTile>(rows.dq[0], gradients, key_desc(shared.pipeline.sK[stage]));
    ptx::warpgroup_commit_batch();
  }

  // Computes dS of this block from the finished S and dP.
  __device__ void compute_ds(Rows &rows, int block) const {
    ptx::warpgroup_fence_operand(rows.scores[0]);
    ptx::warpgroup_fence_operand(rows.gradients[0]);
    Roles::consumer_release(shared.pipeline.v_empty[state.index]);
    rows.compute_ds(shared.pipeline.facts[state.facts], (block + 1) * kColumns > rows.task.columns.full);
  }

  __device__ void mainloop(Rows &rows, int blocks) {
    Pipeline &pipeline = shared.pipeline;
    uint32_t gradients[kColumns / 16][4];
    start_scores(rows);
    ptx::warpgroup_wait<0>();
    compute_ds(rows, 0);
    pack_left<Element>(gradients, rows.scores[0]);
    for (int block = 1; block < blocks; ++block) {
      const int previous = state.index;
      ++state;
      start_scores(rows);
      start_dq(rows, gradients, previous);
      ptx::warpgroup_wait<1>();
      compute_ds(rows, block);
      ptx::warpgroup_wait<0>(rows.dq[0], gradients);
      Roles::consumer_release(pipeline.k_empty[previous]);
      pack_left<Element>(gradients, rows.scores[0]);
    }
    tasks.release();
    start_dq(rows, gradients, state.index);
    ptx::warpgroup_wait<0>(rows.dq[0]);
    Roles::consumer_release(pipeline.k_empty[state.index]);
    ++state;
  }

  __device__ void run_task(const DqTask &task) {
    Rows rows(params, task);
    clear(rows.dq);
    load_queries();
    bool large = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) large |= rows.set_statistics(0, half, shared.statistics[rows.row(0, half)]);
    rows.cuts_probabilities = __any_sync(0xffffffffu, large);
    if (const int blocks = (task.columns.count + kColumns - 1) / kColumns)
      mainloop(rows, blocks);
    else
      tasks.release();
    rows.write();
  }
  __device__ void run() {
    for (; tasks.wait(); tasks.advance()) run_task(tasks.current());
  }
};

template <class Config>
__global__ void __launch_bounds__(Roles::kThreads, 1) dq_kernel_sm90(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto &shared = *reinterpret_cast<DqSharedSm90<Config> *>(dynamic_shared);
  if (threadIdx.x == 0) {
    shared.pipeline.init();
    shared.tasks.init(2 * Roles::kProducerThreads, 0); // the copies, and ordinary stores
  }
  ptx::wait_for_kernel_ahead();
  ptx::start_dependents(); // dkdv starts on SMs that have no more tiles
  __syncthreads();
  using Registers = RoleRegisters<208, 88>;
  if (Roles::is_producer()) {
    Registers::produce();
    produce_dq<Config>(params, shared);
  } else {
    Registers::consume();
    DqConsumer<Config>(params, shared).run();
  }
}

} // namespace fdm::cuda
