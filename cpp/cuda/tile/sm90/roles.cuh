// SPDX-License-Identifier: BSD-3-Clause
// Warp specialization of the Hopper kernels: which warps produce, which consume, and how they hand stages over.
#pragma once

#include <type_traits>

#include "ptx/barrier.cuh"
#include "ptx/registers.cuh"

namespace fdm::cuda {

// A value that all lanes of a warp have. Lane 0's tells the compiler so: what follows from it takes uniform registers.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// The roles of the warps of a thread block: the consumer warpgroups come first, then the producers. The functions have
// the names of CUTLASS's pipelines, but take a stage's barriers.
template <int kGroups> struct WarpRoles {
  static constexpr int kConsumerGroups = kGroups, kConsumerWarps = 4 * kGroups, kProducerWarps = 4;
  static constexpr int kProducerThreads = 32 * kProducerWarps, kThreads = 32 * (kConsumerWarps + kProducerWarps);
  // Kernels may have a lookup warpgroup more, which finds what the producers are to copy.
  static constexpr int kLookupWarps = 4, kLookupThreads = 32 * kLookupWarps;
  static constexpr int kThreadsWithLookup = kThreads + kLookupThreads;
  __device__ static __forceinline__ bool is_lookup() { return threadIdx.x / 32 >= kConsumerWarps + kProducerWarps; }
  // Where lookup warps take turns at blocks, the last of the warpgroup makes tasks.
  static constexpr int kTurnWarpRoom = kLookupWarps - 1;
  __device__ static __forceinline__ int lookup_warp() {
    return uniform(threadIdx.x / 32) - (kConsumerWarps + kProducerWarps);
  }
  __device__ static __forceinline__ void sync_lookup() { ptx::sync_threads<4, kLookupThreads>(); }
  __device__ static __forceinline__ bool is_producer() { return threadIdx.x / 32 >= kConsumerWarps; }
  __device__ static __forceinline__ int consumer_group() { return uniform(threadIdx.x / 128); }
  // The column of a block that this thread of a warpgroup has, the warps side by side; INT32_MAX: none.
  template <int kColumns, int kWarps> __device__ static __forceinline__ int own_column(int block) {
    constexpr int kOwnColumns = kColumns / kWarps;
    const int thread = int(ptx::thread_index());
    const int lane = thread % 32, warp = thread / 32 % kWarps;
    return lane < kOwnColumns ? block * kColumns + warp * kOwnColumns + lane : INT32_MAX;
  }
  // The index of this thread among the producers.
  __device__ static __forceinline__ int producer_thread() { return int(threadIdx.x) - 32 * kConsumerWarps; }
  __device__ static __forceinline__ void sync_producers() { ptx::sync_threads<1, kProducerThreads>(); }
  // Every consumer thread arrives. One thread for each warp is no faster, and compute-sanitizer's racecheck does not
  // see that it stands for the others.
  static constexpr int kConsumerThreads = 32 * kConsumerWarps;
  // 0 is that of __syncthreads, 1 that of sync_producers(), 4 that of sync_lookup().
  static constexpr int kFirstTurnBarrier = 2;
  __device__ static __forceinline__ void consumer_release(uint64_t &empty) { ptx::arrive(empty); }

  // Consumer warpgroups may take turns (ping-pong): while one starts products, the other works with its scores. Group 0
  // is first once group 1 has passed its turn on. Both must take as many turns.
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

  // A producer thread arrives twice: when its copies are done, and for its ordinary stores.
  __device__ static __forceinline__ void producer_commit(uint64_t &full) {
    ptx::arrive_after_copies(full);
    ptx::arrive(full);
  }
  // A producer thread arrives when its copies are done, where a stage holds nothing else.
  __device__ static __forceinline__ void producer_commit_copies(uint64_t &full) { ptx::arrive_after_copies(full); }

  // A consumer waits until a stage is full. Its products may then read the stage. Boxes, and what producers have put
  // behind a fence themselves, need none here (kFenced): it would wait for all that the consumer has stored, too.
  template <bool kFenced = false> __device__ static __forceinline__ void consumer_wait(uint64_t &full, uint32_t phase) {
    ptx::wait(full, phase);
    if constexpr (!kFenced) ptx::fence_async_proxy();
  }
};

// Most kernels have two consumer warpgroups, of 64 rows each.
using Roles = WarpRoles<2>;

// How many registers a thread of each role has. All warpgroups start with as many as fit: 168 where there are three of
// them, 128 where there are four. What the producers give back, the consumers take.
template <int kConsumer, int kProducer, int kGroups = Roles::kConsumerGroups> struct RoleRegisters {
  static_assert(kGroups * kConsumer + kProducer <= (kGroups + 1) * (kGroups == 2 ? 168 : 128),
                "a warpgroup would wait for registers for ever");

  __device__ static __forceinline__ void produce() { ptx::warpgroup_reg_dealloc<kProducer>(); }
  __device__ static __forceinline__ void consume() { ptx::warpgroup_reg_alloc<kConsumer>(); }
};

// The same where there is a lookup warpgroup, with which a thread starts with 128.
template <int kConsumer, int kProducer, int kLookup> struct LookupRoleRegisters {
  static_assert(2 * kConsumer + kProducer + kLookup <= 4 * 128, "a warpgroup would wait for registers for ever");

  __device__ static __forceinline__ void produce() { ptx::warpgroup_reg_dealloc<kProducer>(); }
  __device__ static __forceinline__ void look_up() { ptx::warpgroup_reg_dealloc<kLookup>(); }
  __device__ static __forceinline__ void consume() { ptx::warpgroup_reg_alloc<kConsumer>(); }
};

// Registers of a thread of each role of the forward kernels. None should need local memory, whose loads wait behind all
// copies that were started before: a thousand cycles and more.
template <int kHeadDim>
using ForwardRegisters =
    std::conditional_t<kHeadDim <= 192, LookupRoleRegisters<200, 56, 56>, LookupRoleRegisters<216, 40, 40>>;
// With boxes one warp copies, and needs few registers.
template <int kHeadDim>
using BoxForwardRegisters =
    std::conditional_t<kHeadDim <= 192, LookupRoleRegisters<208, 32, 64>, LookupRoleRegisters<216, 24, 56>>;

// The stage that a role is at, and its phase, as CUTLASS's PipelineState has them.
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
