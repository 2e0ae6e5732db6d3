// SPDX-License-Identifier: BSD-3-Clause
// Stores of matrices, and additions to global memory (PTX ISA: stmatrix and red with vectors of float32 from sm_90 on).
#pragma once

#include <cstdint>

namespace fdm::cuda::ptx {

// Stores four 8 x 8 matrices of 16-bit elements, as ldmatrix loads them; thread t gives the address of row t % 8 of
// matrix t / 8.
__device__ __forceinline__ void stmatrix(uint32_t address, const uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(m[0]),
               "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}

// Adds to a number in global memory, in whichever order threads come. atomicAdd would look where the number lies, if
// the compiler does not know: for a pointer that was in shared memory, with a branch for each number.
__device__ __forceinline__ void add_global(float *sum, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;\n" ::"l"(sum), "f"(x) : "memory");
}

// Adds to four neighbours in global memory, 16-byte aligned, in whichever order threads come.
__device__ __forceinline__ void add_global(float *sums, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(sums), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}

// Adds `bytes` of float32 in shared memory to as many in global memory, both 16-byte aligned. Threads that wrote them
// must have called fence_async_proxy().
__device__ __forceinline__ void add_global_bulk(float *sums, uint32_t shared_sums, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(sums),
               "r"(shared_sums), "r"(bytes)
               : "memory");
}

// Waits until all that this thread has started of these has read the shared memory. The sums are there when the kernel
// has ended.
__device__ __forceinline__ void wait_for_bulk_reads() {
  asm volatile("cp.async.bulk.commit_group;\n"
               "cp.async.bulk.wait_group.read 0;\n" ::
                   : "memory");
}

} // namespace fdm::cuda::ptx
