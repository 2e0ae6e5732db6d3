// SPDX-License-Identifier: BSD-3-Clause
// Asynchronous copies from global to shared memory (PTX ISA: cp.async; sm_80 and later), and single stores and loads.
#pragma once

#include <cstdint>

namespace fdm::cuda::ptx {

__device__ __forceinline__ uint32_t shared_address(const void *p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies `bytes` bytes, at most 16, and fills the rest of the 16 with zeros. With 0, it does not read the source.
__device__ __forceinline__ void cp_async_up_to_16(uint32_t smem, const void *gmem, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(smem), "l"(gmem), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_16(uint32_t smem, const void *gmem, bool valid) {
  cp_async_up_to_16(smem, gmem, valid ? 16 : 0);
}

__device__ __forceinline__ void cp_async_4(uint32_t smem, const void *gmem) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(smem), "l"(gmem) : "memory");
}
// Prefetches the cache line at this address to L2.
__device__ __forceinline__ void prefetch_l2(const void *gmem) {
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(gmem));
}

// Stores 16 bytes, 16-byte aligned, in one instruction. The compiler would split a vector store.
__device__ __forceinline__ void store_global_16(void *gmem, const uint32_t (&words)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"l"(gmem), "r"(words[0]), "r"(words[1]), "r"(words[2]),
               "r"(words[3])
               : "memory");
}

// An ordinary store, for elements with fewer than four bytes in global memory.
__device__ __forceinline__ void store_shared(uint32_t smem, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(smem), "r"(value) : "memory");
}

// Stores 16 bytes, 16-byte aligned, in one instruction.
__device__ __forceinline__ void store_shared(uint32_t smem, uint4 words) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(smem), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w)
               : "memory");
}

__device__ __forceinline__ uint4 load_shared_16_bytes(uint32_t smem) {
  uint4 bytes;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(bytes.x), "=r"(bytes.y), "=r"(bytes.z), "=r"(bytes.w)
               : "r"(smem)
               : "memory");
  return bytes;
}
__device__ __forceinline__ uint16_t load_shared_2_bytes(uint32_t smem) {
  uint16_t bytes;
  asm volatile("ld.shared.b16 %0, [%1];\n" : "=h"(bytes) : "r"(smem) : "memory");
  return bytes;
}

__device__ __forceinline__ void cp_async_fence() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most `Pending` of this thread's newest groups are incomplete.
template <int Pending> __device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(Pending) : "memory");
}

} // namespace fdm::cuda::ptx
