// SPDX-License-Identifier: BSD-3-Clause
// The tile scheduler of persistent kernels. Some lookup warps, or producers if there are no lookup warps, make tasks a
// few tiles ahead. All other warps take them in order.
#pragma once

#include "ptx/registers.cuh"
#include "tile_scheduler.cuh"

namespace fdm::cuda {

// kQueryStages is the number of tasks that may be loaded at a time: the stages of Q.
template <class Task, int kQueryStages = 1> struct TaskRing {
  // Consumers may still write out a task after they have released the next. Further slots hold tasks that wait for
  // their keys, the task that is looked up, the next, and the one that is being made.
  static constexpr int kSlots = 8;

  Task tasks[kSlots];
  bool end[kSlots]; // there are no more tasks from this slot on
  // The task number of each warp, in shared memory because registers are scarce.
  uint32_t number[Roles::kThreadsWithLookup / 32];
  uint64_t made[kSlots], released[kSlots], full[kQueryStages];

  __device__ uint32_t own_number() const { return number[ptx::thread_index() / 32]; }
  __device__ void set_own_number(uint32_t task_number) {
    __syncwarp();
    const uint32_t index = ptx::thread_index();
    if (index % 32 == 0) number[index / 32] = task_number;
    __syncwarp();
  }
  // The parity of the barriers of a slot for task n.
  __device__ static uint32_t phase(uint32_t n) { return n / kSlots % 2; }

  // The stage of the loads of task n, and the parity of its barrier.
  __device__ static uint32_t stage(uint32_t n) { return n % kQueryStages; }
  __device__ static uint32_t stage_phase(uint32_t n) { return n / kQueryStages % 2; }

  __device__ void wait_until_released(uint32_t n) { ptx::wait(released[n % kSlots], phase(n)); }

  // One thread of the block calls this, before the others use the barriers. `arrivals` counts the producer arrivals
  // per task, `release_threads` the threads beside the consumers that release each task.
  __device__ void init(int arrivals, int release_threads) {
    for (int slot = 0; slot < kSlots; ++slot) {
      ptx::init_barrier(made[slot], 1);
      ptx::init_barrier(released[slot], Roles::kConsumerThreads + release_threads);
    }
    for (uint64_t &barrier : full) ptx::init_barrier(barrier, arrivals);
  }
};

// Makes tasks. make(HeadTile, Task &) fills in a task in place. A tile without rows becomes an empty task.
template <class Task, class Make, int kQueryStages = 1> struct TaskMaker {
  using Ring = TaskRing<Task, kQueryStages>;
  static constexpr int kSlots = Ring::kSlots;

  const fdm_problem &p;
  const TileOrder &order;
  uint32_t *const &tickets; // counter of tiles after the first of each thread block; null: the order is fixed
  Ring &ring;
  Make make;

  // A warp makes a task and returns it; null: there are no more.
  __device__ const Task *prepare(uint32_t index) const {
    const uint32_t tile_index = take_tile(index);
    const bool end = tile_index >= sequence_tiles(p) * p.heads;
    HeadTile tile{};
    if (!end) tile = find_tile(p, order, tile_index);
    Task &task = ring.tasks[index % kSlots];
    if (threadIdx.x % 32 == 0) {
      ring.end[index % kSlots] = end;
      if (tile.has_rows())
        make(tile, task);
      else
        task = {};
      ptx::arrive(ring.made[index % kSlots]);
    }
    return end ? nullptr : &task;
  }

private:
  __device__ uint32_t take_tile(uint32_t index) const {
    if (!tickets) return static_cast<uint32_t>(tile_of_round(index));
    if (index == 0) return blockIdx.x;
    uint32_t ticket = 0;
    if (threadIdx.x % 32 == 0) ticket = atomicAdd(tickets, 1u);
    return gridDim.x + __shfl_sync(0xffffffffu, ticket, 0);
  }
};

// A warpgroup whose warps take turns at making tasks: that of the lookup warps, or of the producers.
template <class Maker> struct LookupTasks {
  static constexpr int kSlots = Maker::kSlots;

  const Maker &maker;

  __device__ explicit LookupTasks(const Maker &own_maker) : maker(own_maker) {
    maker.ring.set_own_number(0);
#pragma unroll 1 // the body is large
    for (uint32_t index = 0; index < 2; ++index)
      if (prepares(index)) prepare(index);
    Roles::sync_lookup();
  }

  __device__ const auto &current() const { return maker.ring.tasks[number() % kSlots]; }
  // An empty task after the last one.
  __device__ const auto &next() const { return maker.ring.tasks[(number() + 1) % kSlots]; }
  __device__ bool at_end() const { return maker.ring.end[number() % kSlots]; }

  // One warp prepares the task after the next.
  __device__ bool prepares() const { return prepares(number() + 2); }
  __device__ void prepare_ahead() { prepare(number() + 2); }
  __device__ void advance() {
    maker.ring.set_own_number(number() + 1);
    Roles::sync_lookup();
  }

private:
  __device__ uint32_t number() const { return maker.ring.own_number(); }
  __device__ static bool prepares(uint32_t index) {
    return threadIdx.x / 32 % Roles::kLookupWarps == index % Roles::kLookupWarps;
  }
  __device__ void prepare(uint32_t index) const {
    // A thread that has released task n has written out all tasks before n - 1.
    if (index >= kSlots) maker.ring.wait_until_released(index + 2 - kSlots);
    maker.prepare(index);
  }
};

// One warp of the lookup warpgroup makes all tasks; the other lookup warps take them independently. A tile goes to
// the thread block that requests it first, so requests should not be early: consumers are at the first of kTasksAhead
// tasks.
constexpr uint32_t kTasksAhead = 3;

// All lanes of the warp that makes tasks call on_task(task) for each.
template <class Maker, class OnTask> __device__ void make_tasks(const Maker &maker, const OnTask &on_task) {
  static_assert(kTasksAhead + 2 <= Maker::kSlots,
                "consumers may still write out a task when they have released the next");
#pragma unroll 1
  for (uint32_t index = 0;; ++index) {
    if (index >= kTasksAhead) maker.ring.wait_until_released(index - kTasksAhead);
    const auto *task = maker.prepare(index);
    if (!task) return;
    __syncwarp();
    on_task(*task);
  }
}

// A lookup warp calls look_up(task) for each task.
template <class Ring, class LookUp> __device__ void look_up_tasks(Ring &ring, const LookUp &look_up) {
#pragma unroll 1
  for (uint32_t n = 0;; ++n) {
    const uint32_t slot = n % Ring::kSlots;
    ptx::wait(ring.made[slot], Ring::phase(n));
    if (ring.end[slot]) return;
    look_up(ring.tasks[slot]);
    ptx::arrive(ring.released[slot]);
  }
}

// The producer side: a thread goes through the tasks.
template <class Task, int kQueryStages = 1> struct TaskLoader {
  using Ring = TaskRing<Task, kQueryStages>;
  static constexpr int kSlots = Ring::kSlots;

  Ring &ring;

  __device__ explicit TaskLoader(Ring &shared) : ring(shared) { ring.set_own_number(0); }

  // Waits until the task is made. Returns false if there are no more.
  __device__ bool wait() const {
    const uint32_t n = ring.own_number();
    ptx::wait(ring.made[n % kSlots], Ring::phase(n));
    return !ring.end[n % kSlots];
  }
  __device__ const Task &current() const { return ring.tasks[ring.own_number() % kSlots]; }
  __device__ void advance() { ring.set_own_number(ring.own_number() + 1); }

  // Waits until the consumers have released the task kQueryStages before, whose stage is reused.
  __device__ void producer_acquire() const {
    const uint32_t n = ring.own_number();
    if (n >= kQueryStages) ring.wait_until_released(n - kQueryStages);
  }
  // The stage of the task, and the barrier that hands it to the consumers.
  __device__ uint32_t stage() const { return Ring::stage(ring.own_number()); }
  __device__ uint64_t &full() const { return ring.full[stage()]; }
  // Hands the task to the consumers. Its copies have been started.
  __device__ void producer_commit() { Roles::producer_commit(full()); }
  __device__ void producer_tail() {
    producer_acquire();
    producer_commit();
  }
};

// The consumer side. A consumer releases each task once, after its last read of loaded data.
// kFenced: TMA loads boxes, which products may read without a fence.
template <class Task, int kQueryStages = 1, bool kFenced = false> struct RingConsumer {
  using Ring = TaskRing<Task, kQueryStages>;
  static constexpr int kSlots = Ring::kSlots;

  Ring &ring;

  __device__ explicit RingConsumer(Ring &shared) : ring(shared) { ring.set_own_number(0); }

  // Waits until a task is loaded. Returns false if there are no more.
  __device__ bool wait() const {
    const uint32_t n = ring.own_number();
    Roles::consumer_wait<kFenced>(ring.full[Ring::stage(n)], Ring::stage_phase(n));
    return !uniform(ring.end[ring.own_number() % kSlots]);
  }
  __device__ uint32_t stage() const { return Ring::stage(ring.own_number()); }
  __device__ const Task &current() const { return ring.tasks[ring.own_number() % kSlots]; }
  __device__ const Task &previous() const { return ring.tasks[(ring.own_number() - 1) % kSlots]; }
  __device__ void release() const { Roles::consumer_release(ring.released[ring.own_number() % kSlots]); }
  __device__ void advance() { ring.set_own_number(ring.own_number() + 1); }
};

} // namespace fdm::cuda
