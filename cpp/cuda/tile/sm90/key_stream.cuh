// SPDX-License-Identifier: BSD-3-Clause
// The pipeline of K and V: producer warps gather kColumns rows of K and V at a time, while consumer warpgroups
// multiply earlier blocks. Lookup warps have found the rows before (key_lookup.cuh, block_lookup.cuh). Each stage has
// "full" and "empty" barriers.
#pragma once

#include "../row_places.cuh"
#include "row_gather.cuh"
#include "tile_sizes.cuh"

namespace fdm::cuda {

template <int kHeadDim, int kValueDimension, int kColumnCount, int kKStageCount, int kVStageCount, Lookup kLookupChoice>
struct KeyStream {
  static constexpr int kValueDim = kValueDimension;
  static constexpr int kColumns = kColumnCount, kKStages = kKStageCount, kVStages = kVStageCount;
  static constexpr Lookup kLookup = kLookupChoice;
  // A warp may wait for an empty stage only if it knows that the stage was empty one round earlier: a parity does not
  // tell two rounds apart. With at most as many warps as stages, the warp has seen this when it stored its previous
  // block.
  static constexpr int kTurnWarps = kKStages < Roles::kMaxTurnWarps ? kKStages : Roles::kMaxTurnWarps;
  // The lookup threads that release tasks.
  static constexpr int kTaskReleaseThreads = kLookup == Lookup::warps ? 32 * kTurnWarps : 0;

  static constexpr bool kFenced = false;        // cp.async copies need a fence
  static constexpr bool kHasBlockFlags = false; // column counts tell the number of blocks, and which are partial
  // The arrivals of the producer threads per task: each arrives for its copies, and to pass the task on.
  static constexpr int kQueryArrivals = 2 * Roles::kProducerThreads;
  static_assert(kKStages >= 2, "K of a block may be in use until the scores of the next are started");
  using Tile = SmemTile<kHeadDim, kColumns>;
  using ValueTile = SmemTile<kValueDim, kColumns>;
  using Gather = RowGather<Tile, kColumns>;
  using ValueGather = RowGather<ValueTile, kColumns>;
  static_assert(Gather::kStepRows == ValueGather::kStepRows, "rows are listed once, at their list_index() of either");
  using KPipelineState = PipelineState<kKStages>;
  using VPipelineState = PipelineState<kVStages>;
  // The facts of a block are stored with its K, when that stage is empty. Its rows are read again for V, before K of
  // the next block is released.
  static constexpr int kRowSlots = kKStages + 1;
  using RowState = PipelineState<kRowSlots>;

  // The state that park() saves.
  struct Parked {
    int32_t key, next_key;
    uint32_t bias_bits;
    KPipelineState k_state;
    RowState row_state;
  };

  alignas(1024) char sK[kKStages][Tile::kBytes];
  char sV[kVStages][ValueTile::kBytes];
  ColumnFacts<kColumns> facts[kKStages];
  alignas(16) int32_t rows[kRowSlots][kColumns]; // their rows of K and V, each at its Gather::list_index(); -1: none
  Parked parked[32];                             // of one warp
  uint64_t found[kKStages], k_full[kKStages], v_full[kVStages], k_empty[kKStages], v_empty[kVStages];

  // One thread of the block calls this, before the others use the barriers.
  __device__ void init() {
    for (int stage = 0; stage < kKStages; ++stage) {
      ptx::init_barrier(found[stage], kLookup == Lookup::warps ? 32 : Roles::kLookupThreads);
      ptx::init_barrier(k_full[stage], 2 * Roles::kProducerThreads); // the copies, and the hand-over of facts
      ptx::init_barrier(k_empty[stage], Roles::kConsumerThreads);
    }
    for (int stage = 0; stage < kVStages; ++stage) {
      ptx::init_barrier(v_full[stage], Roles::kProducerThreads);
      ptx::init_barrier(v_empty[stage], Roles::kConsumerThreads);
    }
  }
};

// A producer thread. The blocks of all tasks are one stream: V of a task's last block is loaded between blocks of the
// next task.
template <class Stream> struct KeyGatherer {
  using Gather = typename Stream::Gather;
  using ValueGather = typename Stream::ValueGather;
  // If K has one stage more than V, K of a block is loaded before V of the previous block. That V stage is released
  // so late that K behind it would be late too.
  static constexpr bool kKeysFirst = Stream::kKStages > Stream::kVStages;

  Stream &stream;
  const int head_dim, value_dim;
  const int32_t k_stride, v_stride; // bytes from row to row
  typename Stream::KPipelineState k_state;
  typename Stream::VPipelineState v_state;
  typename Stream::RowState row_state;
  int v_slot = -1; // the rows of the block whose K was loaded last; -1 once its V is loaded too
  const char *first_v = nullptr;

  __device__ KeyGatherer(Stream &shared, const fdm_problem &p, const RowPlaces &rows)
      : stream(shared), head_dim(int(p.head_dim)), value_dim(int(p.v.shape[3])), k_stride(rows.k_bytes),
        v_stride(rows.v_bytes) {}

  // Loads K of the next block if `exists`, with row 0 at first_k; and V of the block whose K was loaded last.
  __device__ void load(const char *first_k, bool exists) {
    if constexpr (!kKeysFirst) load_values();
    const int slot = exists ? load_keys(first_k) : -1;
    if constexpr (kKeysFirst) load_values();
    v_slot = slot;
  }

private:
  __device__ int load_keys(const char *first_k) {
    const int stage = k_state.index, slot = row_state.index;
    ptx::wait(stream.found[stage], k_state.phase);
    const auto rows = Gather::listed(first_k, k_stride, stream.rows[slot]);
    // The lookup threads have already waited for this, so it takes no time.
    Roles::producer_acquire(stream.k_empty[stage], k_state.phase);
    Gather::copy(ptx::shared_address(stream.sK[stage]), rows, head_dim);
    Roles::producer_commit(stream.k_full[stage]);
    ++k_state;
    ++row_state;
    return slot;
  }
  __device__ void load_values() {
    if (v_slot < 0) return;
    const int stage = v_state.index;
    const auto rows = ValueGather::listed(first_v, v_stride, stream.rows[v_slot]);
    Roles::producer_acquire(stream.v_empty[stage], v_state.phase);
    ValueGather::copy(ptx::shared_address(stream.sV[stage]), rows, value_dim);
    Roles::producer_commit_copies(stream.v_full[stage]);
    ++v_state;
  }
};

} // namespace fdm::cuda
