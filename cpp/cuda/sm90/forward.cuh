// SPDX-License-Identifier: BSD-3-Clause
// Forward pass with Hopper's wgmma: blocks of threads that stay, each for one tile of query rows after the other.
//
// A producer warpgroup finds and gathers the rows of Q, K and V (it is as far ahead as the stages allow, also over the
// end of a tile); two consumer warpgroups have 64 rows each. The scores of a block are started before the product of the
// block before with V, so the tensor cores work while a warpgroup makes probabilities.
#pragma once

#include "../attention/forward_rows.cuh"
#include "key_stages.cuh"
#include "products.cuh"

namespace fdm::cuda::sm90 {

template <class ElementType, int kHeadDimension, int kColumnCount, int kStageCount> struct ForwardConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kRows = kTileRows, kColumns = kColumnCount;
  using Stages = KeyStages<kHeadDim, kColumnCount, kStageCount>;
  using QTile = PanelTile<kHeadDim, kRows>;
  using Rows = ForwardRows<Element, 1, kColumns / 8, kHeadDim / 8, false>;
  static_assert(kRows == 64 * Roles::kConsumerGroups && kRows == Roles::kProducerThreads);
};

template <class Config> struct ForwardShared {
  // A task is written while consumers may still work on the one before, which needs no Q any more.
  static constexpr int kTasks = 3;

  typename Config::Stages stages;
  alignas(1024) char q[Config::QTile::kBytes];
  ForwardTask tasks[kTasks]; // a head of -1: there are no more
  uint64_t q_full, q_empty;
};

template <class Config> struct ForwardProducer {
  const ForwardParams &params;
  ForwardShared<Config> &shared;
  KeyProducer<typename Config::Stages> keys;
  int task_number = 0;

  __device__ ForwardProducer(const ForwardParams &parameters, ForwardShared<Config> &memory)
      : params(parameters), shared(memory), keys(parameters.p, memory.stages) {}

  __device__ const ForwardTask &make_task(const Sequence &s, int64_t sequence_index, int64_t head, int64_t tile) {
    const fdm_problem &p = params.p;
    ForwardTask &task = shared.tasks[task_number % ForwardShared<Config>::kTasks];
    if (Roles::producer_thread() == 0)
      task = {s,
              sequence_index,
              head,
              head / group_size(p),
              tile * Config::kRows,
              0,
              tile_columns(p, params.plan, s, sequence_index, head, tile),
              score_view(p, p.bias, s, head)};
    Roles::sync_producers();
    return task;
  }

  __device__ void load_queries(const ForwardTask &task) {
    const fdm_tensor &q = params.p.q;
    const int64_t i = task.first_row + Roles::producer_thread();
    const uint16_t *row = kZeroRow;
    if (i < task.s.q_count) row = static_cast<const uint16_t *>(q.data) + row_offset(q, task.s, i, task.head);
    Config::QTile::template gather<Roles::kProducerWarps>(ptx::shared_address(shared.q), keys.warp(), row,
                                                          int(params.p.head_dim));
  }

  // Hands a task, and the queries where it has any, to the consumers.
  __device__ void publish() {
    ptx::arrive_after_copies(shared.q_full);
    ptx::arrive(shared.q_full);
    ++task_number;
  }

  __device__ void run() {
    const fdm_problem &p = params.p;
    const int64_t count = p.batch * params.tiles * p.heads;
    // Heads fastest, so that those of a group meet in the second-level cache; the last tiles, which a causal mask makes
    // the longest, first.
    for (int64_t number = blockIdx.x; number < count; number += gridDim.x) {
      const int64_t place = number / p.heads, sequence_index = place / params.tiles;
      const int64_t tile = params.tiles - 1 - place % params.tiles;
      const Sequence s = sequence(p, sequence_index);
      if (tile * Config::kRows >= s.q_count) continue;
      const ForwardTask &task = make_task(s, sequence_index, number % p.heads, tile);
      keys.start(task);
      ptx::wait(shared.q_empty, task_number % 2 ^ 1);
      load_queries(task);
      publish();
      keys.run(task);
    }
    // Nothing is published before the consumers have seen the last task.
    ptx::wait(shared.q_empty, task_number % 2 ^ 1);
    if (Roles::producer_thread() == 0) shared.tasks[task_number % ForwardShared<Config>::kTasks].head = -1;
    publish();
  }
};

template <class Config> struct ForwardConsumer {
  using Element = typename Config::Element;
  using Stages = typename Config::Stages;
  using QTile = typename Config::QTile;
  using KeyTile = typename Stages::Tile;
  static constexpr int kColumns = Config::kColumns, kHeadDim = Config::kHeadDim;

  const ForwardParams &params;
  ForwardShared<Config> &shared;
  typename Stages::Cursor cursor;
  uint64_t q_tile;

  __device__ ForwardConsumer(const ForwardParams &parameters, ForwardShared<Config> &memory)
      : params(parameters), shared(memory) {
    q_tile = QTile::descriptor(ptx::shared_address(shared.q)) + QTile::offset(64 * Roles::consumer_group(), 0);
  }

  __device__ void start_scores(typename Config::Rows &rows, int stage) const {
    const uint64_t k = KeyTile::descriptor(ptx::shared_address(shared.stages.k[stage]));
    ptx::fence_products();
    start_rows<Element, QTile, KeyTile, kHeadDim>(rows.scores[0], q_tile, k, false);
    ptx::commit_products();
  }

  __device__ void start_output(typename Config::Rows &rows, const uint32_t (&probabilities)[kColumns / 16][4],
                               int stage) const {
    const uint64_t v = KeyTile::descriptor(ptx::shared_address(shared.stages.v[stage]));
    ptx::fence_products();
    start_columns<Element, KeyTile>(rows.out[0], probabilities, v);
    ptx::commit_products();
  }

  __device__ void wait_full(uint64_t &full, uint32_t parity) const {
    ptx::wait(full, parity);
    ptx::fence_async_proxy();
  }

  // Scores to probabilities, relative to the rows' running maxima, which have grown by the factors.
  __device__ void make_probabilities(typename Config::Rows &rows, int block, float (&factors)[2]) {
    const ForwardTask &task = rows.task;
    ptx::hold(rows.scores[0]);
    Roles::release(shared.stages.k_empty[cursor.stage]);
    rows.finish_scores(shared.stages.facts[cursor.facts], (block + 1) * kColumns > task.columns.full);
    factors[0] = rows.softmax(0, 0), factors[1] = rows.softmax(0, 1);
  }

  __device__ void run_blocks(typename Config::Rows &rows, int blocks) {
    Stages &stages = shared.stages;
    uint32_t probabilities[kColumns / 16][4];
    float factors[2];
    wait_full(stages.k_full[cursor.stage], cursor.parity);
    start_scores(rows, cursor.stage);
    ptx::wait_products<0>();
    make_probabilities(rows, 0, factors);
    pack_left<Element>(probabilities, rows.scores[0]);
    for (int block = 1; block < blocks; ++block) {
      const typename Stages::Cursor before = cursor;
      cursor.next();
      wait_full(stages.k_full[cursor.stage], cursor.parity);
      start_scores(rows, cursor.stage);
      wait_full(stages.v_full[before.stage], before.parity);
      start_output(rows, probabilities, before.stage);
      ptx::wait_products<1>();
      make_probabilities(rows, block, factors);
      ptx::wait_products<0>();
      ptx::hold(rows.out[0]);
      ptx::hold(probabilities);
      Roles::release(stages.v_empty[before.stage]);
      rows.rescale(0, 0, factors[0]), rows.rescale(0, 1, factors[1]);
      pack_left<Element>(probabilities, rows.scores[0]);
    }
    Roles::release(shared.q_empty);
    wait_full(stages.v_full[cursor.stage], cursor.parity);
    start_output(rows, probabilities, cursor.stage);
    ptx::wait_products<0>();
    ptx::hold(rows.out[0]);
    Roles::release(stages.v_empty[cursor.stage]);
    cursor.next();
  }

  __device__ void run_task(const ForwardTask &task) {
    typename Config::Rows rows(params, task);
    rows.start();
    if (const int blocks = (task.columns.count + kColumns - 1) / kColumns)
      run_blocks(rows, blocks);
    else
      Roles::release(shared.q_empty);
    rows.finish();
    rows.write();
  }

  __device__ void run() {
    for (int task_number = 0;; ++task_number) {
      wait_full(shared.q_full, task_number % 2);
      const ForwardTask &task = shared.tasks[task_number % ForwardShared<Config>::kTasks];
      if (task.head < 0) return;
      run_task(task);
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(Roles::kThreads, 1) forward_kernel(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto &shared = *reinterpret_cast<ForwardShared<Config> *>(dynamic_shared);
  if (threadIdx.x == 0) {
    shared.stages.init();
    ptx::init_barrier(shared.q_full, 2 * Roles::kProducerThreads);
    ptx::init_barrier(shared.q_empty, Roles::kConsumerWarps);
  }
  __syncthreads();
  if (Roles::is_producer()) {
    ptx::give_registers<Roles::kProducerRegisters>();
    ForwardProducer<Config>(params, shared).run();
  } else {
    ptx::take_registers<Roles::kConsumerRegisters>();
    ForwardConsumer<Config>(params, shared).run();
  }
}

} // namespace fdm::cuda::sm90
