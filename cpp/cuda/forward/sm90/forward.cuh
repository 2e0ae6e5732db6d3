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

namespace fdm::cuda {

template <class ElementType, int kHeadDimension, int kColumnCount, int kKStages, int kVStages>
struct ForwardConfigSm90 {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kRows = kTileRows, kColumns = kColumnCount;
  using Pipeline = KeyPipeline<kHeadDim, kColumnCount, kKStages, kVStages>;
  using QTile = SmemTile<kHeadDim, kRows>;
  using Rows = ForwardRows<Element, 1, kColumns / 8, kHeadDim / 8, false, false, true>;
  static_assert(kRows == 64 * Roles::kConsumerGroups && kRows == Roles::kProducerThreads);
};

template <class Config> struct ForwardSharedSm90 {
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

template <class Config>
__device__ void produce_forward(const ForwardParams &params, ForwardSharedSm90<Config> &shared) {
  const fdm_problem &p = params.p;
  const auto make = [&](const HeadTile &t) -> ForwardTask {
    return {t.s,
            t.sequence_index,
            t.head,
            kv_head_of(p, t.head),
            t.tile * Config::kRows,
            0,
            tile_columns(p, params.plan, t.s, t.sequence_index, t.head, t.tile),
            score_view(p, p.bias, t.s, t.head),
            sink_score(p, t.head)};
  };
  TaskProducer<ForwardTask, decltype(make)> scheduler(p, shared.tasks, make);
  KeyProducer<typename Config::Pipeline> keys(p, shared.pipeline);
  keys.start(scheduler.current());
  for (; !scheduler.at_end(); scheduler.advance()) {
    const ForwardTask &task = scheduler.current(), &next = scheduler.next();
    keys.begin(task, next);
    scheduler.producer_acquire();
    load_queries<Config>(params, task, shared.sQ);
    scheduler.producer_commit();
    scheduler.prepare_ahead();
    keys.run(task, next);
  }
  keys.finish();
  scheduler.producer_tail();
}

// The blocks of all tiles are one stream. A step starts the scores of a block and the product of the block before with
// V, then turns the scores into probabilities while that product is computed. So the last product of a tile goes along
// with the first scores of the next tile, and a tile is written out in the first step of the next.
template <class Config> struct ForwardConsumer {
  using Element = typename Config::Element;
  using Pipeline = typename Config::Pipeline;
  using QTile = typename Config::QTile;
  using KeyTile = typename Pipeline::Tile;
  using Rows = typename Config::Rows;
  static constexpr int kColumns = Config::kColumns, kHeadDim = Config::kHeadDim;

  const ForwardParams &params;
  ForwardSharedSm90<Config> &shared;
  typename Pipeline::KPipelineState k_state;
  typename Pipeline::VPipelineState v_state;
  int group;
  uint64_t q_desc;
  uint32_t probabilities[kColumns / 16][4];
  Rows rows;

  __device__ ForwardConsumer(const ForwardParams &parameters, ForwardSharedSm90<Config> &memory)
      : params(parameters), shared(memory), group(Roles::consumer_group()), rows(parameters, memory.tasks.tasks[0]) {
    q_desc = QTile::descriptor(ptx::shared_address(shared.sQ)) + QTile::offset(64 * group, 0);
    if (group == 1) Roles::pass_turn(group);
  }

  __device__ void start_scores() {
    const uint64_t k = KeyTile::descriptor(ptx::shared_address(shared.pipeline.sK[k_state.index]));
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss<Element, QTile, KeyTile, kHeadDim>(rows.scores[0], q_desc, k, false);
    ptx::warpgroup_commit_batch();
  }

  __device__ void start_output() {
    const uint64_t v = KeyTile::descriptor(ptx::shared_address(shared.pipeline.sV[v_state.index]));
    Roles::consumer_wait(shared.pipeline.v_full[v_state.index], v_state.phase);
    ptx::warpgroup_arrive();
    warpgroup_gemm_rs<Element, KeyTile>(rows.out[0], probabilities, v);
    ptx::warpgroup_commit_batch();
  }

  __device__ void finish_output() {
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_fence_operand(rows.out[0]);
    ptx::warpgroup_fence_operand(probabilities);
    Roles::consumer_release(shared.pipeline.v_empty[v_state.index]);
    ++v_state;
  }

  // What comes before a block: nothing, the last block of the tile before, or a block of the same tile.
  enum class After { nothing, tile, block };

  template <After kAfter> __device__ void step(const TaskConsumer<ForwardTask> &tasks, int block, int blocks) {
    Pipeline &pipeline = shared.pipeline;
    Roles::consumer_wait(pipeline.k_full[k_state.index], k_state.phase);
    Roles::take_turn(group);
    start_scores();
    if constexpr (kAfter != After::nothing) start_output();
    Roles::pass_turn(group);
    ptx::warpgroup_wait<kAfter == After::nothing ? 0 : 1>();
    ptx::warpgroup_fence_operand(rows.scores[0]);
    Roles::consumer_release(pipeline.k_empty[k_state.index]);
    if (block + 1 == blocks) Roles::consumer_release(shared.tasks.empty); // Q of the next tile may come
    rows.finish_scores(pipeline.facts[k_state.facts], (block + 1) * kColumns > tasks.current().columns.full);
    ++k_state;
    [[maybe_unused]] const RowSums before = take_sums();
    if constexpr (kAfter != After::block) rows.start_sums();
    const float factors[2] = {rows.softmax(0, 0), rows.softmax(0, 1)};
    if constexpr (kAfter != After::nothing) finish_output();
    pack_left<Element>(probabilities, rows.scores[0]);
    if constexpr (kAfter == After::block) {
      rows.rescale(0, 0, factors[0]);
      rows.rescale(0, 1, factors[1]);
    } else {
      if constexpr (kAfter == After::tile) write(tasks.before(), before);
      clear(rows.out);
    }
  }

  struct RowSums {
    float maximum[2], sum[2];
  };
  __device__ RowSums take_sums() const {
    return {{rows.maximum[0][0], rows.maximum[0][1]}, {rows.sum[0][0], rows.sum[0][1]}};
  }
  __device__ void put_sums(const RowSums &sums) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.maximum[0][half] = sums.maximum[half];
      rows.sum[0][half] = sums.sum[half];
    }
  }

  // The epilogue of a task, whose sums have made room for those of the next tile.
  __device__ void write(const ForwardTask &task, const RowSums &sums) {
    const RowSums next = take_sums();
    put_sums(sums);
    rows.task = &task;
    rows.finish();
    rows.write();
    put_sums(next);
  }

  // Goes through all tasks.
  __device__ void run() {
    TaskConsumer<ForwardTask> tasks(shared.tasks);
    while (tasks.wait()) {
      if (blocks_of(tasks.current()) > 0) {
        run_stream(tasks);
        continue;
      }
      Roles::consumer_release(shared.tasks.empty);
      rows.task = &tasks.current();
      rows.start();
      rows.write();
      tasks.advance();
    }
  }

  // Goes through tasks up to one without columns.
  __device__ void run_stream(TaskConsumer<ForwardTask> &tasks) {
    int blocks = blocks_of(tasks.current());
    step<After::nothing>(tasks, 0, blocks);
    for (;;) {
      for (int block = 1; block < blocks; ++block) step<After::block>(tasks, block, blocks);
      tasks.advance();
      if (!tasks.wait()) break;
      blocks = blocks_of(tasks.current());
      if (blocks == 0) break;
      step<After::tile>(tasks, 0, blocks);
    }
    start_output();
    finish_output();
    write(tasks.before(), take_sums());
  }

  __device__ static int blocks_of(const ForwardTask &task) {
    return int(uint32_t(uniform(task.columns.count + kColumns - 1)) / kColumns);
  }
};

template <class Config>
__global__ void __launch_bounds__(Roles::kThreads, 1)
    forward_kernel_sm90(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto &shared = *reinterpret_cast<ForwardSharedSm90<Config> *>(dynamic_shared);
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
    consumer.run();
  }
}

} // namespace fdm::cuda
