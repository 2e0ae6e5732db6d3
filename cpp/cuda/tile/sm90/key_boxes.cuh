// SPDX-License-Identifier: BSD-3-Clause
// The pipeline of K and V for tiles whose columns are consecutive keys. TMA copies them as boxes of rows, without a
// gather. One warp starts the copies. The lookup warpgroup finds the bias of each key and the queries that keep it.
// It zeroes V of keys that no query of the tile keeps, since 0 * NaN is NaN. Each stage has "full" and "empty"
// barriers.
#pragma once

#include "key_columns.cuh"

namespace fdm::cuda {

template <int kHeadDim, int kValueDimension, int kColumnCount, int kKStageCount, int kVStageCount> struct KeyBoxes {
  static constexpr int kValueDim = kValueDimension;
  static constexpr int kColumns = kColumnCount, kKStages = kKStageCount, kVStages = kVStageCount;
  static_assert(kKStages >= 2, "K of a block may be in use until the scores of the next are started");
  static constexpr bool kHasBlockFlags = true, kFenced = true;
  static constexpr int kTaskReleaseThreads = 0; // lookup threads do not release tasks
  static constexpr int kQueryArrivals = 1;      // of the copying warp, per task
  using Tile = SmemTile<kHeadDim, kColumns>;
  using ValueTile = SmemTile<kValueDim, kColumns>;
  using KPipelineState = PipelineState<kKStages>;
  using VPipelineState = PipelineState<kVStages>;

  alignas(1024) char sK[kKStages][Tile::kBytes];
  char sV[kVStages][ValueTile::kBytes];
  // The facts of a block are stored with its K, when that stage is empty.
  ColumnFacts<kColumns> facts[kKStages];
  BlockFlagSlots<kKStages> flags;
  uint64_t k_full[kKStages], v_copied[kVStages], v_full[kVStages], k_empty[kKStages], v_empty[kVStages];

  // One thread of the block calls this, before the others use the barriers.
  __device__ void init() {
    for (int stage = 0; stage < kKStages; ++stage) {
      ptx::init_barrier(k_full[stage], 1 + Roles::kLookupThreads);
      ptx::init_barrier(k_empty[stage], Roles::kConsumerThreads);
    }
    for (int stage = 0; stage < kVStages; ++stage) {
      ptx::init_barrier(v_copied[stage], 1);
      ptx::init_barrier(v_full[stage], Roles::kLookupThreads);
      ptx::init_barrier(v_empty[stage], Roles::kConsumerThreads);
    }
  }
};

// The copying warp. The blocks of all tasks are one stream: V of a task's last block is copied between K blocks of
// the next task.
template <class Boxes> struct BoxCopier {
  Boxes &boxes;
  const CUtensorMap &k, &v;
  typename Boxes::KPipelineState k_state;
  typename Boxes::VPipelineState v_state;
  // The block whose K was copied last, and the previous one; row -1: none.
  BoxCoordinates current = {-1, 0, 0}, previous = current;

  __device__ BoxCopier(Boxes &shared, const CUtensorMap &k_map, const CUtensorMap &v_map)
      : boxes(shared), k(k_map), v(v_map) {}

  template <class Tile>
  __device__ static void copy(const char *tile, const CUtensorMap &map, const BoxCoordinates &coordinates,
                              uint64_t &full) {
    if (threadIdx.x % 32 > 0) return;
    copy_tile_and_arrive<Tile>(tile, map, coordinates, full);
  }

  // Copies K of a block.
  __device__ void copy(const BoxCoordinates &coordinates) {
    const int stage = k_state.index;
    Roles::producer_acquire(boxes.k_empty[stage], k_state.phase);
    copy<typename Boxes::Tile>(boxes.sK[stage], k, coordinates, boxes.k_full[stage]);
    ++k_state;
    current = coordinates;
  }
  // Copies V of the previous block, if it is not copied yet.
  __device__ void copy_previous_values() {
    if (previous.row >= 0) {
      const int stage = v_state.index;
      Roles::producer_acquire(boxes.v_empty[stage], v_state.phase);
      copy<typename Boxes::ValueTile>(boxes.sV[stage], v, previous, boxes.v_copied[stage]);
      ++v_state;
    }
    previous = current;
    current.row = -1;
  }
};

// A lookup thread. It requests the column facts of a block after it has stored those of the previous block, which may
// belong to the previous task.
//
// It calls on_column(task, stage, i, bias) for each column after storing its facts.
template <class Boxes, class OnColumn> struct BoxLookup {
  using Reader = KeyColumnReader<Boxes::kColumns>;

  Boxes &boxes;
  const OnColumn &on_column;
  Reader reader;
  typename Boxes::KPipelineState k_state;
  typename Boxes::VPipelineState v_state;
  bool first_block_requested = false; // the facts of the task's first block are requested
  bool value_pending = false;         // V of the block whose facts were stored last is pending
  bool dead = false;                  // no query of the tile keeps this thread's column of that block

  __device__ BoxLookup(const fdm_problem &problem, Boxes &shared, const OnColumn &call)
      : boxes(shared), on_column(call), reader(problem) {}

  // Stores the facts of the blocks of the current task. meanwhile() is called once, where it delays least.
  template <class Tasks, class Meanwhile> __device__ void run(const Tasks &tasks, const Meanwhile &meanwhile) {
    const int blocks = Reader::blocks_of(tasks.current());
    if (!first_block_requested && blocks > 0) reader.request(tasks.current(), 0);
    first_block_requested = false;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      const bool last = block + 1 == blocks, now_dead = store_block(tasks.current(), block, last);
      if (!last) {
        reader.request(tasks.current(), block + 1);
      } else if (Reader::blocks_of(tasks.next()) > 0) {
        reader.request(tasks.next(), 0);
        first_block_requested = true;
      }
      clear_values();
      value_pending = true;
      dead = now_dead;
      if (block == 0) meanwhile();
    }
    if (blocks > 0) return;
    // Consumers finish their blocks first: many tasks without columns may follow.
    clear_values();
    meanwhile();
  }
  // Clears V of the last block of all.
  __device__ void finish() { clear_values(); }

private:
  // Returns whether no query keeps this thread's column.
  template <class Task> __device__ bool store_block(const Task &task, int block, bool last) {
    const int stage = k_state.index, c = Reader::column(block);
    const bool has_column = c != INT32_MAX;
    const KeyColumn key = reader.read(task, block);
    Roles::producer_acquire(boxes.k_empty[stage], k_state.phase);
    if (has_column) {
      key.store(boxes.facts[stage], c % Boxes::kColumns);
      on_column(task, stage, c % Boxes::kColumns, key.bias);
    }
    boxes.flags.of(k_state).set(has_column && !key.is_full(), last);
    ptx::fence_async_proxy();
    ptx::arrive(boxes.k_full[stage]);
    ++k_state;
    return has_column && key.is_dead();
  }

  // Zeroes V of the previous block's dead column, and then hands that V to the consumers.
  __device__ void clear_values() {
    if (!value_pending) return;
    const int stage = v_state.index;
    ptx::wait(boxes.v_copied[stage], v_state.phase);
    if (dead) {
      using ValueTile = typename Boxes::ValueTile;
      const uint32_t tile = ptx::shared_address(boxes.sV[stage]);
      const int row = Reader::column(0);
#pragma unroll 1
      for (int chunk = 0; chunk < 8 * ValueTile::kPanels; ++chunk)
        ptx::store_shared(ValueTile::chunk_address(tile, row, chunk), uint4{});
    }
    ptx::fence_async_proxy();
    ptx::arrive(boxes.v_full[stage]);
    ++v_state;
    value_pending = false;
  }
};

} // namespace fdm::cuda
