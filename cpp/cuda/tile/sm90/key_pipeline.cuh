// SPDX-License-Identifier: BSD-3-Clause
// The pipeline of K and V: a producer warpgroup gathers rows of K and V, kColumns at a time, while consumer warpgroups
// multiply those of earlier blocks. Each stage has barriers that say "full" and "empty".
#pragma once

#include "../key_ring.cuh"
#include "../smem_tile.cuh"
#include "roles.cuh"

namespace fdm::cuda {

template <int kHeadDim, int kColumnCount, int kKStageCount, int kVStageCount> struct KeyPipeline {
  static constexpr int kColumns = kColumnCount, kKStages = kKStageCount, kVStages = kVStageCount;
  static_assert(kKStages >= 2, "K of a block may be in use until the scores of the next are started");
  using Tile = SmemTile<kHeadDim, kColumns>;
  // Facts of a block are read after its K is released, but not after the K of the next block is.
  static constexpr int kFactSlots = kKStages + 1;
  struct KPipelineState : PipelineState<kKStages> {
    int facts = 0;

    __device__ __forceinline__ void operator++() {
      PipelineState<kKStages>::operator++();
      facts = facts + 1 == kFactSlots ? 0 : facts + 1;
    }
  };
  using VPipelineState = PipelineState<kVStages>;

  alignas(1024) char sK[kKStages][Tile::kBytes];
  char sV[kVStages][Tile::kBytes];
  ColumnFacts<kColumns> facts[kFactSlots];
  uint64_t k_full[kKStages], v_full[kVStages], k_empty[kKStages], v_empty[kVStages];

  // One thread of the block calls this, before the others use the barriers.
  __device__ void init() {
    for (int stage = 0; stage < kKStages; ++stage) {
      ptx::init_barrier(k_full[stage], 2 * Roles::kProducerThreads); // the copies, and the facts
      ptx::init_barrier(k_empty[stage], Roles::kConsumerThreads);
    }
    for (int stage = 0; stage < kVStages; ++stage) {
      ptx::init_barrier(v_full[stage], Roles::kProducerThreads);
      ptx::init_barrier(v_empty[stage], Roles::kConsumerThreads);
    }
  }
};

// A producer thread, which knows one column of each block, or none. The blocks of all tasks are one stream: V of a
// task's last block is loaded among the blocks of the next, whose first columns were asked for before.
template <class Pipeline> struct KeyProducer {
  static constexpr int kColumns = Pipeline::kColumns, kOwnColumns = kColumns / Roles::kProducerWarps;
  using Tile = typename Pipeline::Tile;
  // Where K has a stage more, K of a block is loaded before V of the previous block. The stage of that V is released
  // so late that K would come late too if it had to wait behind it.
  static constexpr bool kValuesLag = Pipeline::kKStages > Pipeline::kVStages;

  const fdm_problem &p;
  Pipeline &pipeline;
  typename Pipeline::KPipelineState k_state;
  typename Pipeline::VPipelineState v_state;
  ColumnEntry entry;
  int32_t next_key;
  const uint16_t *v_row = nullptr; // of the block whose K was loaded last; null once its V is loaded too

  __device__ KeyProducer(const fdm_problem &problem, Pipeline &shared) : p(problem), pipeline(shared) {}

  __device__ static int warp() { return Roles::producer_thread() / 32; }
  __device__ static int column(int block) {
    const int lane = threadIdx.x % 32;
    return lane < kOwnColumns ? block * kColumns + warp() * kOwnColumns + lane : INT32_MAX;
  }
  template <class Task> __device__ static int blocks_of(const Task &task) {
    return (task.columns.count + kColumns - 1) / kColumns;
  }

  // Asks for what is known of the first columns, which is then there when they are loaded.
  template <class Task> __device__ void start(const Task &task) {
    entry = fetch_column(task.columns, task.bias, column(0), fetch_key(task.columns, column(0)));
    next_key = fetch_key(task.columns, column(1));
  }

  // Loads K of a task's first block, so that what comes between begin() and run() need not be waited for first.
  template <class Task> __device__ void begin(const Task &task, const Task &next) {
    if (blocks_of(task) > 0)
      load_block(task, next, 0);
    else
      load_values();
  }
  // Loads the other blocks, but for V of the last.
  template <class Task> __device__ void run(const Task &task, const Task &next) {
    const int blocks = blocks_of(task);
    for (int block = 1; block < blocks; ++block) load_block(task, next, block);
    if (blocks < 2) start(next); // load_block() asked for too little ahead
  }
  // Loads V of the last block of all.
  __device__ void finish() { load_values(); }

private:
  template <class Task> __device__ void load_block(const Task &task, const Task &next, int block) {
    if constexpr (!kValuesLag) load_values();
    const uint16_t *row = load_keys(task, next, block);
    if constexpr (kValuesLag) load_values();
    v_row = row;
  }

  // Loads K and the facts of a block. Returns this lane's row of V.
  template <class Task> __device__ const uint16_t *load_keys(const Task &task, const Task &next, int block) {
    const int stage = k_state.index;
    Roles::producer_acquire(pipeline.k_empty[stage], k_state.phase);
    int32_t key = -1;
    if (threadIdx.x % 32 < kOwnColumns)
      key = store_facts<kColumns>(pipeline.facts[k_state.facts], task.columns, task.bias, column(block), entry);
    const auto row_of = [&](const fdm_tensor &t) {
      return key < 0 ? kZeroRow : key_row(p, t, task.s, task.sequence_index, task.kv_head, key);
    };
    const uint16_t *k_row = row_of(p.k), *row = row_of(p.v);
    ask_ahead(task, next, block);
    Tile::template gather<Roles::kProducerWarps>(ptx::shared_address(pipeline.sK[stage]), warp(), k_row,
                                                 int(p.head_dim));
    Roles::producer_commit(pipeline.k_full[stage]);
    ++k_state;
    return row;
  }

  // Asks for the column of the block after this one, and for the key of the one after that.
  template <class Task> __device__ void ask_ahead(const Task &task, const Task &next, int block) {
    const int left = blocks_of(task) - block; // 1: this is the last
    const Task &after = left > 1 ? task : next, &second = left > 2 ? task : next;
    entry = fetch_column(after.columns, after.bias, column(left > 1 ? block + 1 : 0), next_key);
    next_key = fetch_key(second.columns, column(left > 2 ? block + 2 : 2 - left));
  }

  __device__ void load_values() {
    if (!v_row) return;
    const int stage = v_state.index;
    Roles::producer_acquire(pipeline.v_empty[stage], v_state.phase);
    Tile::template gather<Roles::kProducerWarps>(ptx::shared_address(pipeline.sV[stage]), warp(), v_row,
                                                 int(p.head_dim));
    Roles::producer_commit_copies(pipeline.v_full[stage]);
    ++v_state;
    v_row = nullptr;
  }
};

} // namespace fdm::cuda
