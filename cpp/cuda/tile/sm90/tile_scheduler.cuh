// SPDX-License-Identifier: BSD-3-Clause
// The tile scheduler of persistent kernels: producer warps take turns at making tasks, two tiles before they are
// loaded. The consumers take the tasks in order.
#pragma once

#include "../../../indexing.h"
#include "../../plan/plan.cuh"
#include "../../route/route.h"
#include "roles.cuh"

namespace fdm::cuda {

// A tile of kTileRows query rows of one head. The rows may lie beyond the sequence.
struct HeadTile {
  Sequence s;
  int64_t sequence_index, head, tile;

  __device__ bool has_rows() const { return tile >= 0 && tile * kTileRows < s.q_count; }
};

// The inverse of tile_number() for packed sequences: the last sequence whose first tile number is at most `number`. A
// warp tests 32 sequences at a time.
__device__ __forceinline__ int64_t find_packed_sequence(const fdm_problem &p, int64_t number) {
  const int lane = threadIdx.x % 32;
  int32_t first = 0, count = static_cast<int32_t>(p.batch);
  while (count > 1) {
    const int32_t step = (count + 31) / 32, ahead = lane * step;
    const bool begins = ahead < count && cu_bound(p.cu_seqlens_q, first + ahead) / kTileRows + first + ahead <= number;
    const int32_t taken = max(__popc(__ballot_sync(0xffffffffu, begins)) - 1, 0) * step;
    first += taken;
    count = min(step, count - taken);
  }
  return first;
}

// The tile of a number below sequence_tiles() * heads. The order.heads heads of a pass vary fastest, so heads of a
// GQA group meet in L2; then come the order.sequences sequences. The last tiles, the longest with a causal mask, come
// first. All lanes of a warp call this.
__device__ __forceinline__ HeadTile find_tile(const fdm_problem &p, const TileOrder &order, uint32_t number) {
  const auto heads = static_cast<uint32_t>(order.heads);
  HeadTile found;
  found.head = 0;
  if (order.heads != p.heads) {
    const uint32_t before = divide(number, order.pass_tiles);
    found.head = before * heads;
    number -= before * (static_cast<uint32_t>(sequence_tiles(p)) * heads);
  }
  const uint32_t row = divide(number, order.heads_divisor);
  found.head += number - row * heads;
  if (is_varlen(p)) {
    const int64_t tile = sequence_tiles(p) - 1 - row;
    found.sequence_index = find_packed_sequence(p, tile);
    found.s = sequence(p, found.sequence_index);
    found.tile = tile - tile_number(p, found.s, found.sequence_index, 0);
  } else {
    const auto tiles = static_cast<uint32_t>(ceil_div(p.queries, kTileRows));
    const auto together = static_cast<uint32_t>(order.sequences);
    const uint32_t first = divide(row, order.interleaved_tiles) * together, place = row - first * tiles;
    const uint32_t members = min(together, static_cast<uint32_t>(p.batch) - first);
    const uint32_t from_last = members == together ? divide(place, order.sequences_divisor) : place / members;
    found.sequence_index = first + (place - from_last * members);
    found.s = sequence(p, found.sequence_index);
    found.tile = tiles - 1 - from_last;
  }
  return found;
}

// The tile that a thread block takes as its `index`th in a fixed order. Tiles get shorter towards the end. Every
// other round goes backwards, so that no thread block always has the longest tile.
__device__ __forceinline__ int64_t tile_of_round(uint32_t index) {
  const uint32_t place = index % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  return place + int64_t(index) * gridDim.x;
}

template <class Task> struct TaskPipeline {
  // Consumers may still write out a task after they have released the next, if that has one key block. Further slots
  // hold the task that is loaded, the next, and the one that is being made.
  static constexpr int kSlots = 8;

  Task tasks[kSlots];
  bool end[kSlots]; // there are no more tasks from this slot on
  // The task number of each warp, in shared memory because registers are scarce.
  uint32_t number[Roles::kThreads / 32];

  __device__ uint32_t own_number() const { return number[threadIdx.x / 32]; }
  __device__ void set_own_number(uint32_t task_number) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) number[threadIdx.x / 32] = task_number;
    __syncwarp();
  }
  uint64_t full, empty;

  // One thread of the block calls this, before the others use the barriers.
  __device__ void init() {
    ptx::init_barrier(full, 2 * Roles::kProducerThreads); // the copies, and ordinary stores
    ptx::init_barrier(empty, Roles::kConsumerThreads);
  }
};

// make(HeadTile) returns a Task. A tile without rows becomes an empty task.
template <class Task, class Make> struct TaskProducer {
  static constexpr int kSlots = TaskPipeline<Task>::kSlots;

  const fdm_problem &p;
  const TileOrder &order;
  TaskPipeline<Task> &pipeline;
  const Make &make;

  __device__ TaskProducer(const fdm_problem &problem, const TileOrder &tile_order, TaskPipeline<Task> &shared,
                          const Make &make_task)
      : p(problem), order(tile_order), pipeline(shared), make(make_task) {
    pipeline.set_own_number(0);
#pragma unroll 1 // the body is large
    for (uint32_t index = 0; index < 2; ++index)
      if (prepares(index)) prepare(index);
    Roles::sync_producers();
  }

  __device__ const Task &current() const { return pipeline.tasks[number() % kSlots]; }
  // An empty task after the last one.
  __device__ const Task &next() const { return pipeline.tasks[(number() + 1) % kSlots]; }
  __device__ bool at_end() const { return pipeline.end[number() % kSlots]; }

  // Waits until the consumers have released the loads of the previous task.
  __device__ void producer_acquire() const { Roles::producer_acquire(pipeline.empty, number() % 2); }
  // Hands the task to the consumers. Its copies have been started.
  __device__ void producer_commit() { Roles::producer_commit(pipeline.full); }

  // One warp prepares the task after the next, after producer_acquire(): no thread then needs the slot.
  __device__ bool prepares() const { return prepares(number() + 2); }
  __device__ void prepare_ahead() { prepare(number() + 2); }
  __device__ void advance() {
    pipeline.set_own_number(number() + 1);
    Roles::sync_producers();
  }
  __device__ void producer_tail() {
    producer_acquire();
    producer_commit();
  }

private:
  __device__ uint32_t number() const { return pipeline.own_number(); }
  __device__ static bool prepares(uint32_t index) {
    return uint32_t(Roles::producer_thread()) / 32 == index % Roles::kProducerWarps;
  }
  __device__ void prepare(uint32_t index) {
    const int64_t tile_index = tile_of_round(index);
    const bool end = tile_index >= sequence_tiles(p) * p.heads;
    HeadTile tile{};
    if (!end) tile = find_tile(p, order, static_cast<uint32_t>(tile_index));
    if (threadIdx.x % 32 != 0) return;
    Task &task = pipeline.tasks[index % kSlots];
    pipeline.end[index % kSlots] = end;
    if (tile.has_rows())
      task = make(tile);
    else
      task = {};
  }
};

// A consumer releases pipeline.empty once per task, after its last read of loaded data.
template <class Task> struct TaskConsumer {
  TaskPipeline<Task> &pipeline;

  __device__ explicit TaskConsumer(TaskPipeline<Task> &shared) : pipeline(shared) { pipeline.set_own_number(0); }

  // Waits until a task is loaded. Returns false if there are no more.
  __device__ bool wait() const {
    Roles::consumer_wait(pipeline.full, number() % 2);
    return !uniform(pipeline.end[number() % TaskPipeline<Task>::kSlots]);
  }
  __device__ const Task &current() const { return pipeline.tasks[number() % TaskPipeline<Task>::kSlots]; }
  __device__ const Task &previous() const { return pipeline.tasks[(number() - 1) % TaskPipeline<Task>::kSlots]; }
  __device__ void advance() { pipeline.set_own_number(number() + 1); }

private:
  __device__ uint32_t number() const { return pipeline.own_number(); }
};

} // namespace fdm::cuda
