// SPDX-License-Identifier: BSD-3-Clause
// The lookup warpgroup finds the column facts of a block for the producer and consumer warps, some blocks ahead: the
// rows of K and V, the bias, and the queries that keep them.
#pragma once

#include "ptx/registers.cuh"
#include "stream_lookup.cuh"

namespace fdm::cuda {

// A lookup thread. It has at most one column of each block. The blocks of all tasks are one stream: the first columns
// of a task are requested before the last columns of the previous task are stored. Task data needed for each block is
// held in registers, since the compiler would read it from shared memory each time.
template <class Stream, class OnColumn> struct KeyLookup : StreamLookup<Stream, OnColumn> {
  using Base = StreamLookup<Stream, OnColumn>;
  using Base::blocks_of, Base::kColumns, Base::k_state, Base::p, Base::row_state, Base::stream;
  static constexpr int kOwnColumns = kColumns / Roles::kLookupWarps;

  int32_t key; // of the block after the last stored one, maybe of the next task; -1: none
  uint32_t bias_bits;
  int32_t next_key;        // of the block after that
  const TileColumns *keys; // of the task of the column that is requested next
  const void *biases;      // of the task of the next key; null: none

  using Base::Base;

  // This thread's column in a block of the walk over a task.
  __device__ static int column(const TileColumns &columns, int block) {
    return Roles::own_column<kColumns, Roles::kLookupWarps>(column_block(columns, block));
  }

  // Requests the facts of the first columns early, so they arrive before the columns are stored.
  template <class Task> __device__ void start(const Task &task) {
    keys = &task.columns;
    fetch_from(task);
    fetch(fetch_key(*keys, column(*keys, 0)));
    next_key = fetch_key(*keys, column(*keys, 1));
  }

  // Stores the facts of the blocks of the current task. meanwhile() is called once, where it delays least. Other task
  // data stays in shared memory, because registers are scarce.
  template <class Tasks, class Meanwhile> __device__ void run(const Tasks &tasks, const Meanwhile &meanwhile) {
    hold(tasks, 0);
#pragma unroll 1
    for (int block = 0;; ++block) {
      const int blocks = blocks_of(tasks.current());
      if (block == min(blocks, Stream::kKStages)) {
        meanwhile();
        hold(tasks, block);
      }
      if (block >= blocks) break;
      store_block(tasks, block, blocks);
    }
    if (blocks_of(tasks.current()) < 2) start(tasks.next()); // store_block() requested too little ahead
  }

  // Save and restore registers around other work that needs them. One warp at a time may use them.
  __device__ void park() const {
    stream.parked[threadIdx.x % 32] = {key, next_key, bias_bits, k_state, row_state};
    ptx::compiler_fence();
  }
  __device__ void unpark() {
    ptx::compiler_fence();
    const auto &parked = stream.parked[threadIdx.x % 32];
    key = parked.key;
    next_key = parked.next_key;
    bias_bits = parked.bias_bits;
    k_state = parked.k_state;
    row_state = parked.row_state;
  }

private:
  // Selects the task whose columns are requested next, before this block is stored.
  template <class Tasks> __device__ void hold(const Tasks &tasks, int block) {
    const int left = blocks_of(tasks.current()) - block;
    keys = left < 2 && block > 0 ? &tasks.next().columns : &tasks.current().columns;
    fetch_from(left < 1 && block > 0 ? tasks.next() : tasks.current());
  }

  template <class Tasks> __device__ void store_block(const Tasks &tasks, int block, int blocks) {
    const auto &task = tasks.current();
    const int stage = k_state.index;
    // Few blocks are partial, so the rows that keep their columns are not requested further ahead.
    ColumnEntry entry{key, bias_bits};
    const bool partial = (column_block(task.columns, block) + 1) * kColumns > task.columns.full;
    if (partial && key >= 0) fetch_kept_rows(entry, task.columns);
    Roles::producer_acquire(stream.k_empty[stage], k_state.phase);
    if (threadIdx.x % 32 < kOwnColumns)
      this->store_column(task, bias_view(), column(task.columns, block), partial, entry);
    ptx::arrive(stream.found[stage]);
    this->pass_block();
    request_ahead(tasks, block, blocks - block);
  }

  // Requests the column of the next block, and the key of the block after it. `left` blocks are left, including this
  // one.
  template <class Tasks> __device__ void request_ahead(const Tasks &tasks, int block, int left) {
    if (left <= 2) keys = &tasks.next().columns;
    if (left == 1) fetch_from(tasks.next());
    fetch(next_key);
    next_key = fetch_key(*keys, column(*keys, left > 2 ? block + 2 : 2 - left));
  }

  // Requests columns of this task from here on.
  template <class Task> __device__ void fetch_from(const Task &task) {
    biases = task.bias.per_query ? nullptr : task.bias.data;
  }
  __device__ ScoreView bias_view() const {
    return {biases, 0, p.bias.shape[3] == 1 ? 0 : p.bias.stride[3], p.bias.dtype, false};
  }
  __device__ void fetch(int32_t j) {
    key = j;
    if (j >= 0 && biases) bias_bits = bias_view().load_bits(j);
  }
};

} // namespace fdm::cuda
