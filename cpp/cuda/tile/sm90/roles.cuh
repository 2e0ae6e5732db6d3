// SPDX-License-Identifier: BSD-3-Clause
// Warp specialization of the Hopper kernels: the roles of warps, and the hand-over of pipeline stages.
#pragma once

#include <type_traits>

#include "ptx/barrier.cuh"
#include "ptx/registers.cuh"

namespace fdm::cuda {

// Marks a value that all lanes of a warp share. The shuffle from lane 0 tells the compiler, which then uses uniform
// registers.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// The roles of the warps of a thread block: first the consumer warpgroups, then the producers. The functions are
// named after CUTLASS's pipelines, but take a stage's barriers. There are two consumer warpgroups, of 64 rows each in
// most kernels.
struct Roles {
  static constexpr int kConsumerGroups = 2, kConsumerWarps = 4 * kConsumerGroups, kProducerWarps = 4;
  static constexpr int kProducerThreads = 32 * kProducerWarps, kThreads = 32 * (kConsumerWarps + kProducerWarps);
  // Kernels may add a lookup warpgroup, which finds the rows for the producers to copy.
  static constexpr int kLookupWarps = 4, kLookupThreads = 32 * kLookupWarps;
  static constexpr int kThreadsWithLookup = kThreads + kLookupThreads;
  __device__ static __forceinline__ bool is_lookup() { return threadIdx.x / 32 >= kConsumerWarps + kProducerWarps; }
  // If lookup warps take turns at blocks, the last warp of the warpgroup makes tasks.
  static constexpr int kMaxTurnWarps = kLookupWarps - 1;
  __device__ static __forceinline__ int lookup_warp() {
    return uniform(threadIdx.x / 32) - (kConsumerWarps + kProducerWarps);
  }
  __device__ static __forceinline__ void sync_lookup() { ptx::sync_threads<4, kLookupThreads>(); }
  __device__ static __forceinline__ bool is_producer() { return threadIdx.x / 32 >= kConsumerWarps; }
  __device__ static __forceinline__ int consumer_group() { return uniform(threadIdx.x / 128); }
  // This thread's column of a block, with the warps of the warpgroup side by side; INT32_MAX: none.
  template <int kColumns, int kWarps> __device__ static __forceinline__ int own_column(int block) {
    constexpr int kOwnColumns = kColumns / kWarps;
    const int thread = int(ptx::thread_index());
    const int lane = thread % 32, warp = thread / 32 % kWarps;
    return lane < kOwnColumns ? block * kColumns + warp * kOwnColumns + lane : INT32_MAX;
  }
  // The index of this thread among the producers.
  __device__ static __forceinline__ int producer_thread() { return int(threadIdx.x) - 32 * kConsumerWarps; }
  __device__ static __forceinline__ void sync_producers() { ptx::sync_threads<1, kProducerThreads>(); }
  // Every consumer thread arrives. One arrival per warp is no faster, and compute-sanitizer's racecheck does not see
  // that the thread stands for its warp.
  static constexpr int kConsumerThreads = 32 * kConsumerWarps;
  // __syncthreads uses barrier 0, sync_producers() 1, sync_lookup() 4 (in dq.cuh for producers).
  static constexpr int kFirstTurnBarrier = 2;
  __device__ static __forceinline__ void consumer_release(uint64_t &empty) { ptx::arrive(empty); }

  // Consumer warpgroups may take turns (ping-pong): while one starts products, the other processes its scores. Group
  // 0 is first, after group 1 has passed its turn on. Both must take equally many turns.
  __device__ static __forceinline__ void take_turn(int group) {
    ptx::sync_threads<kConsumerThreads>(kFirstTurnBarrier + group);
  }
  __device__ static __forceinline__ void pass_turn(int group) {
    ptx::arrive_threads<kConsumerThreads>(kFirstTurnBarrier + (1 - group));
  }

  // A producer waits until the consumers have released a stage. All stages are empty at first.
  __device__ static __forceinline__ void producer_acquire(uint64_t &empty, uint32_t phase) {
    ptx::wait(empty, phase ^ 1);
  }

  // A producer thread arrives twice: when its copies are complete, and for its ordinary stores.
  __device__ static __forceinline__ void producer_commit(uint64_t &full) {
    ptx::arrive_after_copies(full);
    ptx::arrive(full);
  }
  // A producer thread arrives when its copies are complete, for stages that hold nothing else.
  __device__ static __forceinline__ void producer_commit_copies(uint64_t &full) { ptx::arrive_after_copies(full); }

  // A consumer waits until a stage is full. Its products may then read the stage. TMA boxes, and writes that
  // producers have fenced, need no fence here (kFenced): it would also wait for all stores of the consumer.
  template <bool kFenced = false> __device__ static __forceinline__ void consumer_wait(uint64_t &full, uint32_t phase) {
    ptx::wait(full, phase);
    if constexpr (!kFenced) ptx::fence_async_proxy();
  }
};

// The registers per thread of each role. Each of the three warpgroups starts with 168. The producers give registers
// back, and the consumers take them.
template <int kConsumer, int kProducer> struct RoleRegisters {
  static_assert(2 * kConsumer + kProducer <= 3 * 168, "a warpgroup would wait for registers for ever");

  __device__ static __forceinline__ void produce() { ptx::warpgroup_reg_dealloc<kProducer>(); }
  __device__ static __forceinline__ void consume() { ptx::warpgroup_reg_alloc<kConsumer>(); }
};

// The same with a lookup warpgroup. Each thread then starts with 128 registers.
template <int kConsumer, int kProducer, int kLookup> struct LookupRoleRegisters {
  static_assert(2 * kConsumer + kProducer + kLookup <= 4 * 128, "a warpgroup would wait for registers for ever");

  __device__ static __forceinline__ void produce() { ptx::warpgroup_reg_dealloc<kProducer>(); }
  __device__ static __forceinline__ void look_up() { ptx::warpgroup_reg_dealloc<kLookup>(); }
  __device__ static __forceinline__ void consume() { ptx::warpgroup_reg_alloc<kConsumer>(); }
};

// Registers per thread of each role of the forward kernels. No role should use local memory: its loads wait behind
// all earlier copies, for a thousand cycles and more.
template <int kHeadDim>
using ForwardRegisters =
    std::conditional_t<kHeadDim <= 192, LookupRoleRegisters<200, 56, 56>, LookupRoleRegisters<216, 40, 40>>;
// With boxes, one warp copies and needs few registers.
template <int kHeadDim>
using BoxForwardRegisters =
    std::conditional_t<kHeadDim <= 192, LookupRoleRegisters<208, 32, 64>, LookupRoleRegisters<216, 24, 56>>;

// The current stage of a role and its phase, like CUTLASS's PipelineState.
template <int kStages> struct PipelineState {
  int index = 0;
  uint32_t phase = 0; // the parity of "full" in this round of the stages

  __device__ __forceinline__ void operator++() {
    if (++index == kStages) {
      index = 0;
      phase ^= 1;
    }
  }
};

} // namespace fdm::cuda
