// SPDX-License-Identifier: BSD-3-Clause
// Lookup warps that take turns at blocks. Each finds the column facts of a whole block for the producer and consumer
// warps, some blocks ahead.
#pragma once

#include "stream_lookup.cuh"

namespace fdm::cuda {

// A lookup warp. The blocks of all tasks are one stream, and each warp has its share. A block needs a chain of loads,
// key -> bias, so several blocks are looked up at a time. The lanes have 32 adjacent columns, then the next 32.
template <class Stream, class OnColumn> struct BlockLookup : StreamLookup<Stream, OnColumn> {
  using Base = StreamLookup<Stream, OnColumn>;
  using Base::kColumns, Base::k_state, Base::pass_block, Base::stream;
  static constexpr int kLaneColumns = kColumns / 32, kWarps = Stream::kTurnWarps;
  static_assert(kColumns % 32 == 0);

  int block; // this warp's next, counted from the first of the task

  __device__ BlockLookup(const fdm_problem &problem, Stream &shared, const RowPlaces &rows, const OnColumn &call,
                         int warp)
      : Base(problem, shared, rows, call), block(warp) {
#pragma unroll 1
    for (int i = 0; i < warp; ++i) pass_block();
  }

  // Stores the facts of this warp's blocks of a task.
  template <class Task> __device__ void run(const Task &task) {
    const int blocks = Base::blocks_of(task);
    int32_t keys[kLaneColumns];
    fetch_keys(task.columns, keys);
#pragma unroll 1
    while (block < blocks) {
      store_block(task, keys);
#pragma unroll
      for (int i = 0; i < kWarps; ++i) pass_block();
    }
    block -= blocks;
  }

private:
  __device__ void fetch_keys(const TileColumns &columns, int32_t (&keys)[kLaneColumns]) const {
    const int first = column_block(columns, block) * kColumns + int(threadIdx.x) % 32;
#pragma unroll
    for (int n = 0; n < kLaneColumns; ++n) keys[n] = fetch_key(columns, first + 32 * n);
  }

  // `keys` has the keys of the block, and then those of this warp's next block.
  template <class Task> __device__ void store_block(const Task &task, int32_t (&keys)[kLaneColumns]) {
    const TileColumns &columns = task.columns;
    const int place = column_block(columns, block), first = place * kColumns + int(threadIdx.x) % 32;
    const int stage = k_state.index;
    const ScoreView bias = task.bias;
    ColumnEntry entries[kLaneColumns];
#pragma unroll
    for (int n = 0; n < kLaneColumns; ++n) {
      entries[n] = {keys[n]};
      if (keys[n] >= 0 && bias.data) entries[n].bias_bits = bias.load_bits(keys[n]);
    }
    const bool partial = (place + 1) * kColumns > columns.full;
    if (partial) {
#pragma unroll
      for (int n = 0; n < kLaneColumns; ++n)
        if (keys[n] >= 0) fetch_kept_rows(entries[n], columns);
    }
    block += kWarps;
    fetch_keys(columns, keys);
    Roles::producer_acquire(stream.k_empty[stage], k_state.phase);
#pragma unroll
    for (int n = 0; n < kLaneColumns; ++n) this->store_column(task, bias, first + 32 * n, partial, entries[n]);
    ptx::arrive(stream.found[stage]);
  }
};

} // namespace fdm::cuda
