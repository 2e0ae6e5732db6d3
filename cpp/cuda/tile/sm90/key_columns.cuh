// SPDX-License-Identifier: BSD-3-Clause
// The facts of consecutive keys, which are copied as boxes: the bias, and the queries of the tile that keep each key.
#pragma once

#include "../key_ring.cuh"
#include "../smem_tile.cuh"
#include "ptx/tensor.cuh"
#include "roles.cuh"

namespace fdm::cuda {

// The facts about a block that consumers read first.
struct alignas(8) BlockFlags {
  bool partial[Roles::kLookupWarps]; // a query may drop a key of this lookup warp
  bool last;                         // the task's last block

  __device__ __forceinline__ bool is_partial() const {
    static_assert(sizeof(partial) == sizeof(uint32_t));
    return *reinterpret_cast<const uint32_t *>(partial) != 0;
  }
  // All lookup threads call this.
  __device__ __forceinline__ void set(bool drops, bool is_last) {
    drops = __any_sync(0xffffffffu, drops);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32 % Roles::kLookupWarps] = drops;
    if (threadIdx.x % Roles::kLookupThreads == 0) last = is_last;
  }
  // One lookup warp calls this, if it knows all keys of the block.
  __device__ __forceinline__ void set_by_one_warp(bool drops, bool is_last) {
    if (threadIdx.x % 32 != 0) return;
    *reinterpret_cast<uint32_t *>(partial) = drops;
    last = is_last;
  }
};

// The flags of the block in each stage and of the stage's previous block. Consumers can then read the flags of a
// block after its release.
template <int kStages> struct BlockFlagSlots {
  BlockFlags slots[2][kStages];

  __device__ __forceinline__ BlockFlags &of(const PipelineState<kStages> &state) {
    return slots[state.phase][state.index];
  }
  // The flags of the block before that of the state.
  __device__ __forceinline__ const BlockFlags &previous(const PipelineState<kStages> &state) const {
    return state.index > 0 ? slots[state.phase][state.index - 1] : slots[state.phase ^ 1][kStages - 1];
  }
};

// The coordinates of a box of a head of a sequence.
struct BoxCoordinates {
  int32_t row, head, batch;
};

// Copies a row tile. The barrier expects its bytes; this is not an arrival.
template <class Tile>
__device__ __forceinline__ void copy_tile(const char *tile, const CUtensorMap &map, const BoxCoordinates &coordinates,
                                          uint64_t &full) {
  ptx::expect_bytes(full, Tile::kBytes);
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel)
    ptx::copy_box(ptx::shared_address(tile) + panel * Tile::kPanelBytes, map, 64 * panel, coordinates.row,
                  coordinates.head, coordinates.batch, full);
}

// The same for a barrier with one arrival, which happens when the copy has been started.
template <class Tile>
__device__ __forceinline__ void copy_tile_and_arrive(const char *tile, const CUtensorMap &map,
                                                     const BoxCoordinates &coordinates, uint64_t &full) {
  copy_tile<Tile>(tile, map, coordinates, full);
  ptx::arrive(full);
}

// A key, as the queries of a tile see it.
struct KeyColumn {
  RowWord word;
  float bias; // base-2 bias; -inf: no query of the tile keeps it

  __device__ bool is_dead() const { return bias == -INFINITY; }
  __device__ bool is_full() const {
    uint32_t all = ~0u;
#pragma unroll
    for (int part = 0; part < kTileRows / 32; ++part) all &= word.part[part];
    return all == ~0u;
  }
  __device__ static KeyColumn none() { return {{}, -INFINITY}; }

  template <int kColumns> __device__ void store(ColumnFacts<kColumns> &facts, int i) const {
    facts.bias[i] = bias;
#pragma unroll
    for (int part = 0; part < kTileRows / 32; ++part) facts.word[part][i] = word.part[part];
  }
};

// A lookup thread has at most one key of each block. It requests global data one block ahead.
template <int kColumns> struct KeyColumnReader {
  const fdm_problem &p;
  uint32_t bias_bits;

  __device__ explicit KeyColumnReader(const fdm_problem &problem) : p(problem) {}

  __device__ static int column(int block) { return Roles::own_column<kColumns, Roles::kLookupWarps>(block); }
  template <class Task> __device__ static int column(const Task &task, int block) {
    return column(column_block(task.columns, block));
  }
  template <class Task> __device__ static int blocks_of(const Task &task) {
    return (task.columns.count + kColumns - 1) / kColumns;
  }

  __device__ ScoreView bias_view(const void *data) const {
    return {data, 0, p.bias.shape[3] == 1 ? 0 : p.bias.stride[3], p.bias.dtype, false};
  }

  template <class Task> __device__ void request(const Task &task, int block) {
    const int c = column(task, block);
    if (task.bias.data && c < task.columns.count) bias_bits = bias_view(task.bias.data).load_bits(c);
  }

  // The key of the block that request() requested.
  template <class Task> __device__ KeyColumn read(const Task &task, int block) const {
    const int c = column(task, block);
    if (c >= task.columns.count) return KeyColumn::none();
    KeyColumn key{column_word(task.columns, c, c, 0, 0, {}), 0.0f};
    if (task.bias.data) key.bias = to_base_2(bias_view(nullptr).convert(bias_bits));
    uint32_t any = 0;
#pragma unroll
    for (int part = 0; part < kTileRows / 32; ++part) any |= key.word.part[part];
    return any == 0 || key.bias == -INFINITY ? KeyColumn::none() : key;
  }
};

} // namespace fdm::cuda
