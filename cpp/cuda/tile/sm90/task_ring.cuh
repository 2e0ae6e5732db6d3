// SPDX-License-Identifier: BSD-3-Clause
// The tile scheduler of persistent kernels with lookup warps: some make tasks, a few tiles ahead; all others take them
// one after the other.
#pragma once

#include "ptx/registers.cuh"
#include "tile_scheduler.cuh"

namespace fdm::cuda {

// kLoads is how many tasks may be loaded at a time: the stages of Q.
template <class Task, int kLoads = 1> struct TaskRing {
  // Consumers may still write out a task when they have released the next; then come those that wait for their keys,
  // the one that is looked up, the next, and the one that is made meanwhile.
  static constexpr int kSlots = 8;

  Task tasks[kSlots];
  bool end[kSlots]; // there are no more tasks from this slot on
  // The number of the task of each warp, in shared memory since registers are scarce.
  uint32_t number[Roles::kThreadsWithLookup / 32];
  uint64_t made[kSlots], released[kSlots], full[kLoads];

  __device__ uint32_t own_number() const { return number[ptx::thread_index() / 32]; }
  __device__ void set_own_number(uint32_t task_number) {
    __syncwarp();
    const uint32_t index = ptx::thread_index();
    if (index % 32 == 0) number[index / 32] = task_number;
    __syncwarp();
  }
  // The parity of the barriers of a slot when it has task n.
  __device__ static uint32_t phase(uint32_t n) { return n / kSlots % 2; }

  // The stage of what is loaded for task n, and the parity of its barrier.
  __device__ static uint32_t stage(uint32_t n) { return n % kLoads; }
  __device__ static uint32_t stage_phase(uint32_t n) { return n / kLoads % 2; }

  __device__ void wait_until_released(uint32_t n) { ptx::wait(released[n % kSlots], phase(n)); }

  // One thread of the block calls this, before the others use the barriers. `arrivals` are those of the producers for a
  // task, `readers` the threads that release each task beside the consumers.
  __device__ void init(int arrivals, int readers) {
    for (int slot = 0; slot < kSlots; ++slot) {
      ptx::init_barrier(made[slot], 1);
      ptx::init_barrier(released[slot], Roles::kConsumerThreads + readers);
    }
    for (uint64_t &barrier : full) ptx::init_barrier(barrier, arrivals);
  }
};

// Makes tasks. make(HeadTile, Task &) fills in a task where it lies. A tile without rows becomes an empty one.
template <class Task, class Make, int kLoads = 1> struct TaskMaker {
  using Ring = TaskRing<Task, kLoads>;
  static constexpr int kSlots = Ring::kSlots;

  const fdm_problem &p;
  const TileOrder &order;
  uint32_t *const &tickets; // the next tile of all but the first of each thread block; null: their order is fixed
  Ring &ring;
  Make make;

  // A warp makes a task and returns it; null: there are no more.
  __device__ const Task *prepare(uint32_t index) const {
    const uint32_t tile_index = place(index);
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
  __device__ uint32_t place(uint32_t index) const {
    if (!tickets) return static_cast<uint32_t>(tile_of_round(index));
    if (index == 0) return blockIdx.x;
    uint32_t ticket = 0;
    if (threadIdx.x % 32 == 0) ticket = atomicAdd(tickets, 1u);
    return gridDim.x + __shfl_sync(0xffffffffu, ticket, 0);
  }
};

// A lookup warpgroup, whose warps take turns at making tasks.
template <class Maker> struct LookupTasks {
  static constexpr int kSlots = Maker::kSlots;

  const Maker &maker;

  __device__ explicit LookupTasks(const Maker &own_maker) : maker(own_maker) {
    maker.ring.set_own_number(0);
#pragma unroll 1 // the code is long
    for (uint32_t index = 0; index < 2; ++index)
      if (prepares(index)) prepare(index);
    Roles::sync_lookup();
  }

  __device__ const auto &current() const { return maker.ring.tasks[number() % kSlots]; }
  // It keeps no keys where there is none.
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
    // Who has released a task has written those before the one before.
    if (index >= kSlots) maker.ring.wait_until_released(index + 2 - kSlots);
    maker.prepare(index);
  }
};

// One warp of the lookup warpgroup makes all tasks, and the other lookup warps go through them as they like. Tiles go
// to the block that asks first, and should not be requested much too early: consumers are at the first of so many
// tasks.
constexpr uint32_t kTasksAhead = 3;

// on_task(task) is called for each task, by all lanes of the warp that makes them.
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

// A producer thread goes through the tasks.
template <class Task, int kLoads = 1> struct TaskLoader {
  using Ring = TaskRing<Task, kLoads>;
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

  // Waits until the consumers no longer need what was loaded kLoads tasks before.
  __device__ void producer_acquire() const {
    const uint32_t n = ring.own_number();
    if (n >= kLoads) ring.wait_until_released(n - kLoads);
  }
  // The stage of the task, and the barrier that hands it to the consumers.
  __device__ uint32_t stage() const { return Ring::stage(ring.own_number()); }
  __device__ uint64_t &full() const { return ring.full[stage()]; }
  // Hands the task to the consumers. The copies that belong to it have been started.
  __device__ void producer_commit() { Roles::producer_commit(full()); }
  __device__ void producer_tail() {
    producer_acquire();
    producer_commit();
  }
};

// A consumer releases each task once, when it needs nothing more that was loaded.
// kBoxes: what is loaded comes as boxes, which products may read as soon as they are there.
template <class Task, int kLoads = 1, bool kBoxes = false> struct RingConsumer {
  using Ring = TaskRing<Task, kLoads>;
  static constexpr int kSlots = Ring::kSlots;

  Ring &ring;

  __device__ explicit RingConsumer(Ring &shared) : ring(shared) { ring.set_own_number(0); }

  // Waits until a task is loaded. Returns false if there are no more.
  __device__ bool wait() const {
    const uint32_t n = ring.own_number();
    Roles::consumer_wait<kBoxes>(ring.full[Ring::stage(n)], Ring::stage_phase(n));
    return !uniform(ring.end[ring.own_number() % kSlots]);
  }
  __device__ uint32_t stage() const { return Ring::stage(ring.own_number()); }
  __device__ const Task &current() const { return ring.tasks[ring.own_number() % kSlots]; }
  __device__ const Task &before() const { return ring.tasks[(ring.own_number() - 1) % kSlots]; }
  __device__ void release() const { Roles::consumer_release(ring.released[ring.own_number() % kSlots]); }
  __device__ void advance() { ring.set_own_number(ring.own_number() + 1); }
};

} // namespace fdm::cuda
