// SPDX-License-Identifier: BSD-3-Clause
// The tile scheduler of persistent kernels: the producers find tasks and load what belongs to a task as a
// whole; the consumers take them one after the other.
#pragma once

#include "../../../indexing.h"
#include "roles.cuh"

namespace fdm::cuda {

template <class Task> struct TaskPipeline {
  // A task is written while consumers may still work on the one before, of which nothing is loaded any more.
  static constexpr int kSlots = 3;

  Task tasks[kSlots];
  bool end[kSlots]; // there are no more tasks from this slot on
  uint64_t full, empty;

  // One thread of the block calls this, before the others use the barriers.
  __device__ void init() {
    ptx::init_barrier(full, 2 * Roles::kProducerThreads); // the copies, and ordinary stores
    ptx::init_barrier(empty, Roles::kConsumerThreads);
  }
};

template <class Task> struct TaskProducer {
  TaskPipeline<Task> &pipeline;
  int number = 0;

  __device__ explicit TaskProducer(TaskPipeline<Task> &shared) : pipeline(shared) {}

  // Makes a new task, which the producers know before the consumers do.
  template <class Make> __device__ const Task &prepare(const Make &make) {
    const int slot = number % TaskPipeline<Task>::kSlots;
    if (Roles::producer_thread() == 0) {
      pipeline.tasks[slot] = make();
      pipeline.end[slot] = false;
    }
    Roles::sync_producers();
    return pipeline.tasks[slot];
  }
  // Waits until the consumers no longer need what was loaded for the previous task.
  __device__ void producer_acquire() const { Roles::producer_acquire(pipeline.empty, number % 2); }
  // Hands the task to the consumers. The copies that belong to it have been started.
  __device__ void producer_commit() {
    Roles::producer_commit(pipeline.full);
    ++number;
  }
  __device__ void producer_tail() {
    producer_acquire();
    if (Roles::producer_thread() == 0) pipeline.end[number % TaskPipeline<Task>::kSlots] = true;
    producer_commit();
  }
};

// Calls function(task) for each task. It must release pipeline.empty once, when it needs nothing more that was loaded.
template <class Task, class Function>
__device__ void for_each_task(TaskPipeline<Task> &pipeline, const Function &function) {
  for (int number = 0;; ++number) {
    Roles::consumer_wait(pipeline.full, number % 2);
    const int slot = number % TaskPipeline<Task>::kSlots;
    if (pipeline.end[slot]) return;
    function(pipeline.tasks[slot]);
  }
}

// Calls function(sequence, its index, head, tile of kRows rows) for this block's share of the tiles. Heads go fastest,
// and those of a group meet in L2. The last tiles, which a causal mask makes the longest, come first.
template <int kRows, class Function> __device__ void for_each_tile(const fdm_problem &p, const Function &function) {
  const int64_t tiles = ceil_div(p.queries, kRows), count = p.batch * tiles * p.heads;
  for (int64_t number = blockIdx.x; number < count; number += gridDim.x) {
    const int64_t tile_index = number / p.heads, sequence_index = tile_index / tiles;
    const int64_t tile = tiles - 1 - tile_index % tiles;
    const Sequence s = sequence(p, sequence_index);
    if (tile * kRows < s.q_count) function(s, sequence_index, number % p.heads, tile);
  }
}

} // namespace fdm::cuda
