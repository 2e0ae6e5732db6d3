// SPDX-License-Identifier: BSD-3-Clause
// The gradient of the queries with Hopper's wgmma: a persistent kernel, one block of threads on each SM, with the roles of forward.cuh.
//
// The product of dS with K is started after the next block's scores and dP, so the tensor cores work while a warpgroup
// makes dS.
#pragma once

#include "../../ptx/dependent.cuh"
#include "../../tile/sm90/key_pipeline.cuh"
#include "../../tile/sm90/products.cuh"
#include "../../tile/sm90/tile_scheduler.cuh"
#include "../dq_rows.cuh"

namespace fdm::cuda::sm90 {

template <class ElementType, int kHeadDimension, int kColumnCount, int kStageCount> struct DqConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kRows = kTileRows, kColumns = kColumnCount;
  using Stages = KeyPipeline<kHeadDim, kColumnCount, kStageCount, kStageCount>;
  using RowTile = PanelTile<kHeadDim, kRows>;
  using Rows = DqRows<Element, 1, kColumns / 8, kHeadDim, false>;
  static_assert(kRows == 64 * Roles::kConsumerGroups && kRows == Roles::kProducerThreads);
  // Q as a left operand in registers: the products of two operands in shared memory would be bound by reading it.
  static constexpr bool kQueriesInRegisters = kHeadDim <= 128;
};

template <class Config> struct DqShared {
  typename Config::Stages stages;
  alignas(1024) char q[Config::RowTile::kBytes];
  char dout[Config::RowTile::kBytes];
  RowStatistics statistics[Config::kRows];
  TaskPipeline<DqTask> tasks;
};

// Rows without a gradient are zeros, whatever lies there: not even NaN in dO may reach a result.
template <class Config>
__device__ void load_rows(const BackwardParams &params, const DqTask &task, const RowStatistics &statistics,
                          DqShared<Config> &shared) {
  const int thread = Roles::producer_thread();
  shared.statistics[thread] = statistics;
  const auto load = [&](const fdm_tensor &t, char *to) {
    const uint16_t *row = kZeroRow;
    if (!statistics.empty())
      row = static_cast<const uint16_t *>(t.data) + row_offset(t, task.s, task.first_row + thread, task.head);
    Config::RowTile::template gather<Roles::kProducerWarps>(ptx::shared_address(to), thread / 32, row,
                                                            int(params.p.head_dim));
  };
  load(params.p.q, shared.q);
  load(params.a.dout, shared.dout);
}

template <class Config> __device__ void produce_dq(const BackwardParams &params, DqShared<Config> &shared) {
  const fdm_problem &p = params.p;
  TaskProducer<DqTask> sender(shared.tasks);
  KeyProducer<typename Config::Stages> keys(p, shared.stages);
  for_each_tile<Config::kRows>(p, [&](const Sequence &s, int64_t sequence_index, int64_t head, int64_t tile) {
    const DqTask &task = sender.prepare([&]() -> DqTask {
      return {s,
              sequence_index,
              head,
              head / group_size(p),
              tile * Config::kRows,
              tile_columns(p, params.plan, s, sequence_index, head, tile),
              score_view(p, p.bias, s, head)};
    });
    keys.start(task);
    const int64_t i = task.first_row + Roles::producer_thread();
    RowStatistics statistics{INFINITY, 0.0f};
    if (i < s.q_count) statistics = row_statistics(params, s, head, i);
    sender.wait_empty();
    load_rows<Config>(params, task, statistics, shared);
    sender.publish();
    keys.run(task);
  });
  sender.finish();
}

template <class Config> struct DqConsumer {
  using Element = typename Config::Element;
  using Stages = typename Config::Stages;
  using RowTile = typename Config::RowTile;
  using KeyTile = typename Stages::Tile;
  using Rows = typename Config::Rows;
  static constexpr int kColumns = Config::kColumns, kHeadDim = Config::kHeadDim;

  const BackwardParams &params;
  DqShared<Config> &shared;
  typename Stages::KPipelineState state; // K and V have the same stages
  uint64_t q_tile, dout_tile;
  uint32_t queries[Config::kQueriesInRegisters ? kHeadDim / 16 : 1][4];

  __device__ DqConsumer(const BackwardParams &parameters, DqShared<Config> &memory)
      : params(parameters), shared(memory) {
    const uint64_t own_rows = RowTile::offset(64 * Roles::consumer_group(), 0);
    q_tile = RowTile::descriptor(ptx::shared_address(shared.q)) + own_rows;
    dout_tile = RowTile::descriptor(ptx::shared_address(shared.dout)) + own_rows;
  }

  __device__ static uint64_t key_tile(const char *tile) { return KeyTile::descriptor(ptx::shared_address(tile)); }

  // Reads Q of this task, where it stays in registers.
  __device__ void load_queries() {
    if constexpr (Config::kQueriesInRegisters)
      load_left<RowTile>(queries, ptx::shared_address(shared.q), int(threadIdx.x) / 32 * 16);
  }

  // S and dP.
  __device__ void start_scores(Rows &rows) const {
    Stages &stages = shared.stages;
    Roles::wait_full(stages.k_full[state.stage], state.parity);
    ptx::warpgroup_arrive();
    if constexpr (Config::kQueriesInRegisters)
      warpgroup_gemm_ss<Element, KeyTile>(rows.scores[0], queries, key_tile(stages.k[state.stage]));
    else
      warpgroup_gemm_ss<Element, RowTile, KeyTile, kHeadDim>(rows.scores[0], q_tile, key_tile(stages.k[state.stage]),
                                                             false);
    Roles::wait_full(stages.v_full[state.stage], state.parity);
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss<Element, RowTile, KeyTile, kHeadDim>(rows.gradients[0], dout_tile,
                                                           key_tile(stages.v[state.stage]), false);
    ptx::warpgroup_commit_batch();
  }

  __device__ void start_dq(Rows &rows, const uint32_t (&gradients)[kColumns / 16][4], int stage) const {
    ptx::warpgroup_arrive();
    warpgroup_gemm_rs<Element, KeyTile>(rows.dq[0], gradients, key_tile(shared.stages.k[stage]));
    ptx::warpgroup_commit_batch();
  }

  // dS of this block, once S and dP are there.
  __device__ void make_gradients(Rows &rows, int block) const {
    ptx::warpgroup_fence_operand(rows.scores[0]);
    ptx::warpgroup_fence_operand(rows.gradients[0]);
    Roles::release(shared.stages.v_empty[state.stage]);
    rows.make_gradients(shared.stages.facts[state.facts], (block + 1) * kColumns > rows.task.columns.full);
  }

  __device__ void run_blocks(Rows &rows, int blocks) {
    Stages &stages = shared.stages;
    uint32_t gradients[kColumns / 16][4];
    start_scores(rows);
    ptx::warpgroup_wait<0>();
    make_gradients(rows, 0);
    pack_left<Element>(gradients, rows.scores[0]);
    for (int block = 1; block < blocks; ++block) {
      const int before = state.stage;
      state.next();
      start_scores(rows);
      start_dq(rows, gradients, before);
      ptx::warpgroup_wait<1>();
      make_gradients(rows, block);
      ptx::warpgroup_wait<0>();
      ptx::warpgroup_fence_operand(rows.dq[0]);
      ptx::warpgroup_fence_operand(gradients);
      Roles::release(stages.k_empty[before]);
      pack_left<Element>(gradients, rows.scores[0]);
    }
    Roles::release(shared.tasks.empty);
    start_dq(rows, gradients, state.stage);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_fence_operand(rows.dq[0]);
    Roles::release(stages.k_empty[state.stage]);
    state.next();
  }

  __device__ void run_task(const DqTask &task) {
    Rows rows(params, task);
    clear(rows.dq);
    load_queries();
    bool large = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) large |= rows.set_statistics(0, half, shared.statistics[rows.row(0, half)]);
    rows.careful = __any_sync(0xffffffffu, large);
    if (const int blocks = (task.columns.count + kColumns - 1) / kColumns)
      run_blocks(rows, blocks);
    else
      Roles::release(shared.tasks.empty);
    rows.write();
  }
};

template <class Config>
__global__ void __launch_bounds__(Roles::kThreads, 1) dq_kernel(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto &shared = *reinterpret_cast<DqShared<Config> *>(dynamic_shared);
  if (threadIdx.x == 0) {
    shared.stages.init();
    shared.tasks.init();
  }
  ptx::wait_for_kernel_ahead();
  ptx::start_dependents(); // dkdv takes the SMs that have no more tiles
  __syncthreads();
  using Registers = RoleRegisters<208, 88>;
  if (Roles::is_producer()) {
    Registers::produce();
    produce_dq<Config>(params, shared);
  } else {
    Registers::consume();
    DqConsumer<Config> consumer(params, shared);
    for_each_task(shared.tasks, [&](const DqTask &task) { consumer.run_task(task); });
  }
}

} // namespace fdm::cuda::sm90
