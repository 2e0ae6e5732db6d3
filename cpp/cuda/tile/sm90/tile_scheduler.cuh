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
  bool end[kSlots]; // in the place of a task: there are no more
  uint64_t full, empty;

  // By one thread.
  __device__ void init() {
    ptx::init_barrier(full, 2 * Roles::kProducerThreads); // the copies, and ordinary stores
    ptx::init_barrier(empty, Roles::kReleases);
  }
};

template <class Task> struct TaskProducer {
  TaskPipeline<Task> &ring;
  int number = 0;

  __device__ explicit TaskProducer(TaskPipeline<Task> &shared) : ring(shared) {}

  // A new task, which the producers know before the consumers do.
  template <class Make> __device__ const Task &prepare(const Make &make) {
    const int slot = number % TaskPipeline<Task>::kSlots;
    if (Roles::producer_thread() == 0) {
      ring.tasks[slot] = make();
      ring.end[slot] = false;
    }
    Roles::sync_producers();
    return ring.tasks[slot];
  }
  // Until what was loaded for the task before is no longer needed.
  __device__ void wait_empty() const { ptx::wait(ring.empty, number % 2 ^ 1); }
  // After the copies that belong to the task were started.
  __device__ void publish() {
    ptx::arrive_after_copies(ring.full);
    ptx::arrive(ring.full);
    ++number;
  }
  __device__ void finish() {
    wait_empty();
    if (Roles::producer_thread() == 0) ring.end[number % TaskPipeline<Task>::kSlots] = true;
    publish();
  }
};

// Calls function(task) for each task. It must release ring.empty once, when it needs nothing more that was loaded.
template <class Task, class Function>
__device__ void for_each_task(TaskPipeline<Task> &ring, const Function &function) {
  for (int number = 0;; ++number) {
    ptx::wait(ring.full, number % 2);
    ptx::fence_async_proxy();
    const int slot = number % TaskPipeline<Task>::kSlots;
    if (ring.end[slot]) return;
    function(ring.tasks[slot]);
  }
}

// Calls function(sequence, its index, head, tile of kRows rows) for this block's share of the tiles. Heads fastest, so
// that those of a group meet in L2; the last tiles, which a causal mask makes the longest, first.
template <int kRows, class Function> __device__ void for_each_tile(const fdm_problem &p, const Function &function) {
  const int64_t tiles = ceil_div(p.queries, kRows), count = p.batch * tiles * p.heads;
  for (int64_t number = blockIdx.x; number < count; number += gridDim.x) {
    const int64_t place = number / p.heads, sequence_index = place / tiles, tile = tiles - 1 - place % tiles;
    const Sequence s = sequence(p, sequence_index);
    if (tile * kRows < s.q_count) function(s, sequence_index, number % p.heads, tile);
  }
}

} // namespace fdm::cuda
