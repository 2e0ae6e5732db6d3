// SPDX-License-Identifier: BSD-3-Clause
// Mbarriers and the other instructions for warp specialization (PTX ISA: mbarrier, cp.async.mbarrier, bar,
// fence.proxy, setmaxnreg; sm_90).
#pragma once

#include <cstdint>

#include "copy.cuh"

namespace fdm::cuda::ptx {

// A phase ends after `arrivals` arrivals. The block must synchronize before other threads use the barrier.
__device__ __forceinline__ void init_barrier(uint64_t &barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

// The arrival releases this thread's writes to shared memory.
__device__ __forceinline__ void arrive(uint64_t &barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(&barrier)) : "memory");
}

// Arrives when all earlier cp.async copies of this thread are complete. Counts as one of the barrier's arrivals.
__device__ __forceinline__ void arrive_after_copies(uint64_t &barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(shared_address(&barrier)) : "memory");
}

// Waits until a phase of this parity has ended. On a new barrier, parity 1 does not wait.
__device__ __forceinline__ void wait(uint64_t &barrier, uint32_t parity) {
  asm volatile("{\n"
               ".reg .pred done;\n"
               "again:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra again;\n"
               "}\n" ::"r"(shared_address(&barrier)),
               "r"(parity)
               : "memory");
}

// Whether a phase of this parity has ended; does not wait.
__device__ __forceinline__ bool test_wait(uint64_t &barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n"
               ".reg .pred done;\n"
               "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
               "selp.u32 %0, 1, 0, done;\n"
               "}\n"
               : "=r"(done)
               : "r"(shared_address(&barrier)), "r"(parity)
               : "memory");
  return done != 0;
}

// Makes ordinary stores and cp.async writes to shared memory visible to wgmma and TMA.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// Synchronizes `kThreads` threads of the block. __syncthreads uses barrier 0.
template <int kNumber, int kThreads> __device__ __forceinline__ void sync_threads() {
  asm volatile("bar.sync %0, %1;\n" ::"n"(kNumber), "n"(kThreads) : "memory");
}

// The same for a barrier number known at run time. arrive_threads() arrives without waiting.
template <int kThreads> __device__ __forceinline__ void sync_threads(int number) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(number), "n"(kThreads) : "memory");
}
template <int kThreads> __device__ __forceinline__ void arrive_threads(int number) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(number), "n"(kThreads) : "memory");
}

// Set the number of registers of each thread of this warpgroup, a multiple of 8. All its warps must call them.
template <int kRegisters> __device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters> __device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

} // namespace fdm::cuda::ptx
