// SPDX-License-Identifier: BSD-3-Clause
// Forward pass with Hopper's wgmma: a persistent kernel, one block of threads on each SM.
//
// The kernel is warp-specialized. A producer warpgroup finds and gathers the rows of Q, K and V, as far ahead as the
// stages of the pipeline allow, also over the end of a tile. Two consumer warpgroups have 64 rows each. In their
// mainloop, the scores of a block are started before the previous block's product with V, so the tensor cores work
// while a warpgroup makes probabilities.
#pragma once

#include "../../ptx/dependent.cuh"
#include "../../tile/sm90/key_pipeline.cuh"
#include "../../tile/sm90/products.cuh"
#include "../../tile/sm90/tile_scheduler.cuh"
#include "../forward_rows.cuh"

namespace fdm::cuda::sm90 {

template <class ElementType, int kHeadDimension, int kColumnCount, int kKStages, int kVStages> struct ForwardConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kRows = kTileRows, kColumns = kColumnCount;
  using Pipeline = KeyPipeline<kHeadDim, kColumnCount, kKStages, kVStages>;
  using QTile = PanelTile<kHeadDim, kRows>;
  using Rows = ForwardRows<Element, 1, kColumns / 8, kHeadDim / 8, false>;
  static_assert(kRows == 64 * Roles::kConsumerGroups && kRows == Roles::kProducerThreads);
};

template <class Config> struct ForwardShared {
  typename Config::Pipeline pipeline;
  alignas(1024) char sQ[Config::QTile::kBytes];
  TaskPipeline<ForwardTask> tasks;
};

template <class Config> __device__ void load_queries(const ForwardParams &params, const ForwardTask &task, char *sQ) {
  const fdm_tensor &q = params.p.q;
  const int thread = Roles::producer_thread();
  const int64_t i = task.first_row + thread;
  const uint16_t *row = kZeroRow;
  if (i < task.s.q_count) row = static_cast<const uint16_t *>(q.data) + row_offset(q, task.s, i, task.head);
  Config::QTile::template gather<Roles::kProducerWarps>(ptx::shared_address(sQ), thread / 32, row,
                                                        int(params.p.head_dim));
}

template <class Config> __device__ void produce_forward(const ForwardParams &params, ForwardShared<Config> &shared) {
  const fdm_problem &p = params.p;
  TaskProducer<ForwardTask> scheduler(shared.tasks);
  KeyProducer<typename Config::Pipeline> keys(p, shared.pipeline);
  for_each_tile<Config::kRows>(p, [&](const Sequence &s, int64_t sequence_index, int64_t head, int64_t tile) {
    const ForwardTask &task = scheduler.prepare([&]() -> ForwardTask {
      return {s,
              sequence_index,
              head,
              head / group_size(p),
              tile * Config::kRows,
              0,
              tile_columns(p, params.plan, s, sequence_index, head, tile),
              score_view(p, p.bias, s, head),
              sink_score(p, head)};
    });
    keys.start(task);
    scheduler.producer_acquire();
    load_queries<Config>(params, task, shared.sQ);
    scheduler.producer_commit();
    keys.run(task);
  });
  scheduler.producer_tail();
}

template <class Config> struct ForwardConsumer {
  using Element = typename Config::Element;
  using Pipeline = typename Config::Pipeline;
  using QTile = typename Config::QTile;
  using KeyTile = typename Pipeline::Tile;
  static constexpr int kColumns = Config::kColumns, kHeadDim = Config::kHeadDim;

  const ForwardParams &params;
  ForwardShared<Config> &shared;
  typename Pipeline::KPipelineState k_state;
  typename Pipeline::VPipelineState v_state;
  uint64_t q_desc;

  __device__ ForwardConsumer(const ForwardParams &parameters, ForwardShared<Config> &memory)
      : params(parameters), shared(memory) {
    q_desc = QTile::descriptor(ptx::shared_address(shared.sQ)) + QTile::offset(64 * Roles::consumer_group(), 0);
  }

  __device__ void start_scores(typename Config::Rows &rows, int stage) const {
    const uint64_t k = KeyTile::descriptor(ptx::shared_address(shared.pipeline.sK[stage]));
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss<Element, QTile, KeyTile, kHeadDim>(rows.scores[0], q_desc, k, false);
    ptx::warpgroup_commit_batch();
  }

  __device__ void start_output(typename Config::Rows &rows, const uint32_t (&probabilities)[kColumns / 16][4],
                               int stage) const {
    const uint64_t v = KeyTile::descriptor(ptx::shared_address(shared.pipeline.sV[stage]));
    ptx::warpgroup_arrive();
    warpgroup_gemm_rs<Element, KeyTile>(rows.out[0], probabilities, v);
    ptx::warpgroup_commit_batch();
  }

  // Turns scores into probabilities, relative to the rows' running maxima, which have grown by the factors.
  __device__ void make_probabilities(typename Config::Rows &rows, int block, float (&factors)[2]) {
    const ForwardTask &task = rows.task;
    ptx::warpgroup_fence_operand(rows.scores[0]);
    Roles::consumer_release(shared.pipeline.k_empty[k_state.index]);
    rows.finish_scores(shared.pipeline.facts[k_state.facts], (block + 1) * kColumns > task.columns.full);
    factors[0] = rows.softmax(0, 0);
    factors[1] = rows.softmax(0, 1);
  }

  __device__ void mainloop(typename Config::Rows &rows, int blocks) {
    Pipeline &pipeline = shared.pipeline;
    uint32_t probabilities[kColumns / 16][4];
    float factors[2];
    Roles::consumer_wait(pipeline.k_full[k_state.index], k_state.phase);
    start_scores(rows, k_state.index);
    ptx::warpgroup_wait<0>();
    make_probabilities(rows, 0, factors);
    pack_left<Element>(probabilities, rows.scores[0]);
    for (int block = 1; block < blocks; ++block) {
      ++k_state;
      Roles::consumer_wait(pipeline.k_full[k_state.index], k_state.phase);
      start_scores(rows, k_state.index);
      Roles::consumer_wait(pipeline.v_full[v_state.index], v_state.phase);
      start_output(rows, probabilities, v_state.index);
      ptx::warpgroup_wait<1>();
      make_probabilities(rows, block, factors);
      ptx::warpgroup_wait<0>();
      ptx::warpgroup_fence_operand(rows.out[0]);
      ptx::warpgroup_fence_operand(probabilities);
      Roles::consumer_release(pipeline.v_empty[v_state.index]);
      ++v_state;
      rows.rescale(0, 0, factors[0]);
      rows.rescale(0, 1, factors[1]);
      pack_left<Element>(probabilities, rows.scores[0]);
    }
    Roles::consumer_release(shared.tasks.empty);
    Roles::consumer_wait(pipeline.v_full[v_state.index], v_state.phase);
    start_output(rows, probabilities, v_state.index);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_fence_operand(rows.out[0]);
    Roles::consumer_release(pipeline.v_empty[v_state.index]);
    ++k_state;
    ++v_state;
  }

  __device__ void run_task(const ForwardTask &task) {
    typename Config::Rows rows(params, task);
    rows.start();
    if (const int blocks = (task.columns.count + kColumns - 1) / kColumns)
      mainloop(rows, blocks);
    else
      Roles::consumer_release(shared.tasks.empty);
    rows.finish();
    rows.write();
  }
};

template <class Config>
__global__ void __launch_bounds__(Roles::kThreads, 1) forward_kernel(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto &shared = *reinterpret_cast<ForwardShared<Config> *>(dynamic_shared);
  if (threadIdx.x == 0) {
    shared.pipeline.init();
    shared.tasks.init();
  }
  ptx::wait_for_kernel_ahead();
  __syncthreads();
  using Registers = RoleRegisters<208, 88>;
  if (Roles::is_producer()) {
    Registers::produce();
    produce_forward<Config>(params, shared);
  } else {
    Registers::consume();
    ForwardConsumer<Config> consumer(params, shared);
    for_each_task(shared.tasks, [&](const ForwardTask &task) { consumer.run_task(task); });
  }
}

} // namespace fdm::cuda::sm90
