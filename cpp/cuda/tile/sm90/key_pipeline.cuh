// SPDX-License-Identifier: BSD-3-Clause
// The pipeline of K and V of kernels without lookup warps (compare key_stream.cuh). A producer warpgroup finds and
// gathers kColumns rows of K and V at a time, while consumer warpgroups multiply earlier blocks. Each stage has
// "full" and "empty" barriers.
#pragma once

#include "../key_ring.cuh"
#include "../smem_tile.cuh"
#include "ptx/registers.cuh"
#include "roles.cuh"

namespace fdm::cuda {

template <int kHeadDim, int kColumnCount, int kKStageCount, int kVStageCount> struct KeyPipeline {
  static constexpr int kColumns = kColumnCount, kKStages = kKStageCount, kVStages = kVStageCount;
  static_assert(kKStages >= 2, "K of a block may be in use until the scores of the next are started");
  using Tile = SmemTile<kHeadDim, kColumns>;
  // The facts of a block are read after its K is released, but not after K of the next block is released.
  static constexpr int kFactSlots = kKStages + 1;
  struct KPipelineState : PipelineState<kKStages> {
    int facts = 0;

    __device__ __forceinline__ void operator++() {
      PipelineState<kKStages>::operator++();
      facts = facts + 1 == kFactSlots ? 0 : facts + 1;
    }
  };
  using VPipelineState = PipelineState<kVStages>;

  // The state that park() saves.
  struct Parked {
    ColumnEntry entry;
    int32_t next_key;
    KPipelineState k_state;
    VPipelineState v_state;
    const uint16_t *v_row;
  };

  alignas(1024) char sK[kKStages][Tile::kBytes];
  char sV[kVStages][Tile::kBytes];
  ColumnFacts<kColumns> facts[kFactSlots];
  Parked parked[32]; // of one warp
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

// A producer thread. It has at most one column of each block. The blocks of all tasks are one stream: V of a task's
// last block is loaded between blocks of the next task, whose first columns are requested earlier. Task data needed
// for each block is held in registers, since the compiler would read it from shared memory each time.
template <class Pipeline> struct KeyProducer {
  static constexpr int kColumns = Pipeline::kColumns, kOwnColumns = kColumns / Roles::kProducerWarps;
  using Tile = typename Pipeline::Tile;

  const fdm_problem &p;
  Pipeline &pipeline;
  typename Pipeline::KPipelineState k_state;
  typename Pipeline::VPipelineState v_state;
  const uint16_t *first_k, *first_v; // key 0 of the current task
  int32_t full;                      // its full columns
  ColumnEntry entry;                 // of the block after the last loaded one, which may be the next task's
  const TileColumns *entry_columns;
  int32_t entry_full;
  ScoreView bias;
  int32_t next_key;                // of the block after that
  TileColumns keys;                // read only to find keys
  const uint16_t *v_row = nullptr; // of the block whose K was loaded last; null once its V is loaded too

  __device__ KeyProducer(const fdm_problem &problem, Pipeline &shared) : p(problem), pipeline(shared) {
    bias.col = p.bias.shape[3] == 1 ? 0 : p.bias.stride[3];
    bias.dtype = p.bias.dtype;
    bias.per_query = false;
  }

  __device__ static int warp() { return Roles::producer_thread() / 32; }
  __device__ static int column(int block) { return Roles::own_column<kColumns, Roles::kProducerWarps>(block); }
  template <class Task> __device__ static int blocks_of(const Task &task) {
    return (task.columns.count + kColumns - 1) / kColumns;
  }

  // Requests the facts of the first columns early, so they arrive before the columns are loaded.
  template <class Task> __device__ void start(const Task &task) {
    keys = task.columns;
    fetch_from(task);
    fetch(column(0), fetch_key(keys, column(0)));
    next_key = fetch_key(keys, column(1));
  }

  // Loads K of a task's first block, so that it does not wait for the work between begin() and run().
  template <class Task> __device__ void begin(const Task &task, const Task &next) {
    const int blocks = blocks_of(task);
    hold(task, next, 0, blocks);
    if (blocks > 0)
      load_block(task, next, 0, blocks);
    else
      load_values();
  }
  // Loads the other blocks, except V of the last. meanwhile() is called once, where it delays least: after all stages
  // of K have been requested.
  template <class Task, class Meanwhile>
  __device__ void run(const Task &task, const Task &next, const Meanwhile &meanwhile) {
    const int blocks = blocks_of(task);
    const int filled = max(min(blocks, Pipeline::kKStages), 1);
#pragma unroll 1
    for (int block = 1;; ++block) {
      if (block == filled) {
        meanwhile();
        hold(task, next, block, blocks);
      }
      if (block >= blocks) break;
      load_block(task, next, block, blocks);
    }
    if (blocks_of(task) < 2) start(next); // load_block() requested too little ahead
  }
  // Loads V of the last block of all.
  __device__ void finish() { load_values(); }

  // Save and restore registers around other work that needs them. One warp at a time may use them. The compiler would
  // use local memory, whose loads wait behind all earlier copies.
  __device__ void park() const {
    pipeline.parked[threadIdx.x % 32] = {entry, next_key, k_state, v_state, v_row};
    ptx::compiler_fence();
  }
  __device__ void unpark() {
    ptx::compiler_fence();
    const auto &parked = pipeline.parked[threadIdx.x % 32];
    entry = parked.entry;
    next_key = parked.next_key;
    k_state = parked.k_state;
    v_state = parked.v_state;
    v_row = parked.v_row;
  }

private:
  // Reads task data into registers before this block is loaded.
  template <class Task> __device__ void hold(const Task &task, const Task &next, int block, int blocks) {
    first_k = first_key_row(p.k, task.s, task.kv_head);
    first_v = first_key_row(p.v, task.s, task.kv_head);
    full = task.columns.full;
    keys = blocks - block < 2 && block > 0 ? next.columns : task.columns;
    fetch_from(blocks - block < 1 && block > 0 ? next : task);
  }

  template <class Task> __device__ void load_block(const Task &task, const Task &next, int block, int blocks) {
    load_values();
    v_row = load_keys(task, next, block, blocks);
  }

  // Loads K and the facts of a block. Returns this lane's row of V.
  template <class Task>
  __device__ const uint16_t *load_keys(const Task &task, const Task &next, int block, int blocks) {
    const int stage = k_state.index;
    Roles::producer_acquire(pipeline.k_empty[stage], k_state.phase);
    int32_t key = -1;
    if (threadIdx.x % 32 < kOwnColumns) {
      auto &facts = pipeline.facts[k_state.facts];
      const bool partial = (block + 1) * kColumns > full;
      key = store_facts<kColumns>(facts, task.columns, bias, column(block), partial, entry);
    }
    const auto row_of = [&](const fdm_tensor &t, const uint16_t *first) {
      if (key < 0) return static_cast<const uint16_t *>(kZeroRow);
      if (present(p.block_table)) return key_row(p, t, task.s, task.sequence_index, task.kv_head, key);
      return first + key * t.stride[1];
    };
    const uint16_t *k_row = row_of(p.k, first_k), *row = row_of(p.v, first_v);
    request_ahead(next, block, blocks);
    Tile::template gather<Roles::kProducerWarps>(ptx::shared_address(pipeline.sK[stage]), warp(), k_row,
                                                 int(p.head_dim));
    Roles::producer_commit(pipeline.k_full[stage]);
    ++k_state;
    return row;
  }

  // Requests the column of the next block, and the key of the block after it.
  template <class Task> __device__ void request_ahead(const Task &next, int block, int blocks) {
    const int left = blocks - block; // including this block
    if (left == 2 || (left == 1 && block == 0)) keys = next.columns;
    if (left == 1) fetch_from(next);
    fetch(column(left > 1 ? block + 1 : 0), next_key);
    next_key = fetch_key(keys, column(left > 2 ? block + 2 : 2 - left));
  }

  // Requests columns of this task from here on.
  template <class Task> __device__ void fetch_from(const Task &task) {
    entry_columns = &task.columns;
    entry_full = task.columns.full;
    bias.data = task.bias.per_query ? nullptr : task.bias.data;
  }
  __device__ void fetch(int32_t c, int32_t key) {
    entry = {};
    entry.key = key;
    if (key < 0) return;
    if (bias.data) entry.bias_bits = bias.load_bits(key);
    if (c >= entry_full) fetch_kept_rows(entry, *entry_columns);
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
