// SPDX-License-Identifier: BSD-3-Clause
// Who does what in a block of threads of the Hopper kernels.
#pragma once

#include "../../ptx/barrier.cuh"

namespace fdm::cuda {

// Warps of a block of threads by role: two consumer warpgroups of 64 rows each come first, then the producers.
struct Roles {
  static constexpr int kConsumerGroups = 2, kConsumerWarps = 8, kProducerWarps = 4;
  static constexpr int kProducerThreads = 32 * kProducerWarps, kThreads = 32 * (kConsumerWarps + kProducerWarps);
  __device__ static __forceinline__ bool is_producer() { return threadIdx.x / 32 >= kConsumerWarps; }
  __device__ static __forceinline__ int consumer_group() { return __shfl_sync(0xffffffffu, threadIdx.x / 128, 0); }
  // Among the producers.
  __device__ static __forceinline__ int producer_thread() { return int(threadIdx.x) - 32 * kConsumerWarps; }
  __device__ static __forceinline__ void sync_producers() { ptx::sync_threads<1, kProducerThreads>(); }
  // Every consumer thread arrives: one for each warp is no faster, and compute-sanitizer's racecheck does not see that it
  // stands for the others.
  static constexpr int kReleases = 32 * kConsumerWarps;
  __device__ static __forceinline__ void release(uint64_t &empty) { ptx::arrive(empty); }

  // Until a stage is full. Consumers' products may then read it.
  __device__ static __forceinline__ void wait_full(uint64_t &full, uint32_t parity) {
    ptx::wait(full, parity);
    ptx::fence_async_proxy();
  }
};

// Registers of a thread of each role. All warpgroups start with 168, the most that 384 threads can have; what the producers
// give back, the consumers take.
template <int kConsumer, int kProducer> struct RoleRegisters {
  static_assert(2 * kConsumer + kProducer <= 3 * 168, "a warpgroup would wait for registers for ever");

  __device__ static __forceinline__ void produce() { ptx::give_registers<kProducer>(); }
  __device__ static __forceinline__ void consume() { ptx::take_registers<kConsumer>(); }
};

// Where a role is in the round of stages.
template <int kStages> struct PipelineState {
  int stage = 0;
  uint32_t parity = 0; // of "full" in this round

  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

} // namespace fdm::cuda
