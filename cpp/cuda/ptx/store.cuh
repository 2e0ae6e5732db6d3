// SPDX-License-Identifier: BSD-3-Clause
// Matrix stores, and additions to global memory (PTX ISA: stmatrix, red with vectors of float32; sm_90 and later).
#pragma once

#include <cstdint>

namespace fdm::cuda::ptx {

// Stores four 8 x 8 matrices of 16-bit elements in the layout of ldmatrix. Thread t gives the address of row t % 8 of
// matrix t / 8.
__device__ __forceinline__ void stmatrix(uint32_t address, const uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(m[0]),
               "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}

// Adds to a float in global memory, in any order of threads. With atomicAdd, the compiler does not know the address
// space of a pointer that was stored in shared memory, and emits a branch for each addition.
__device__ __forceinline__ void add_global(float *sum, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;\n" ::"l"(sum), "f"(x) : "memory");
}

// Adds to four consecutive floats in global memory, 16-byte aligned, in any order of threads.
__device__ __forceinline__ void add_global(float *sums, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(sums), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}

// Adds `bytes` of float32 in shared memory to global memory; both are 16-byte aligned. The threads that wrote shared
// memory must have called fence_async_proxy().
__device__ __forceinline__ void add_global_bulk(float *sums, uint32_t shared_sums, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(sums),
               "r"(shared_sums), "r"(bytes)
               : "memory");
}

// Waits until all bulk additions of this thread have read shared memory. The sums are complete when the kernel has
// ended.
__device__ __forceinline__ void wait_for_bulk_reads() {
  asm volatile("cp.async.bulk.commit_group;\n"
               "cp.async.bulk.wait_group.read 0;\n" ::
                   : "memory");
}

} // namespace fdm::cuda::ptx
