// SPDX-License-Identifier: BSD-3-Clause
// Barriers in shared memory, and what warps of different roles need to work together (PTX ISA: mbarrier,
// cp.async.mbarrier, bar, fence.proxy, setmaxnreg; sm_90).
#pragma once

#include <cstdint>

#include "copy.cuh"

namespace fdm::cuda::ptx {

// A phase ends when `arrivals` threads have arrived. Its threads must be synchronized before others use it.
__device__ __forceinline__ void init_barrier(uint64_t &barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

// Releases what this thread has written to shared memory.
__device__ __forceinline__ void arrive(uint64_t &barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(&barrier)) : "memory");
}

// Arrives when the copies that this thread has started so far are done. It is one of the barrier's arrivals.
__device__ __forceinline__ void arrive_after_copies(uint64_t &barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(shared_address(&barrier)) : "memory");
}

// Waits for the end of a phase of this parity; a barrier that was just made is past one of parity 1.
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

// Whether a phase of this parity has ended.
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

// Makes shared memory that ordinary stores and cp.async have written visible to wgmma.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// Synchronizes `kThreads` threads of the block; number 0 is the barrier of __syncthreads.
template <int kNumber, int kThreads> __device__ __forceinline__ void sync_threads() {
  asm volatile("bar.sync %0, %1;\n" ::"n"(kNumber), "n"(kThreads) : "memory");
}

// The same for a barrier that is known at run time only, and for threads that need not wait for the others.
template <int kThreads> __device__ __forceinline__ void sync_threads(int number) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(number), "n"(kThreads) : "memory");
}
template <int kThreads> __device__ __forceinline__ void arrive_threads(int number) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(number), "n"(kThreads) : "memory");
}

// These set how many registers each thread of this warpgroup has from here on, a multiple of 8. All its warps must
// call them.
template <int kRegisters> __device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters> __device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

} // namespace fdm::cuda::ptx
