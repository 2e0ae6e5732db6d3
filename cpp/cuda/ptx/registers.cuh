// SPDX-License-Identifier: BSD-3-Clause
// Barriers against compiler optimizations that would take more registers or instructions.
#pragma once

#include <cstdint>

namespace fdm::cuda::ptx {

// Reads threadIdx.x anew on each call, so the index takes no register between calls (PTX ISA: %tid).
__device__ __forceinline__ uint32_t thread_index() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(index));
  return index;
}

// Returns the same pointer and hides its origin from the compiler. The compiler then adds to the pointer itself, and
// not to its parts.
template <class T> __device__ __forceinline__ T *opaque(T *pointer) {
  asm("" : "+l"(pointer));
  return pointer;
}

// Returns the same value and hides it from the compiler before this point. Expressions of the value are then not
// hoisted, for instance out of a loop.
__device__ __forceinline__ uint32_t opaque_here(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// a b + c, computed here and in its own register (PTX ISA: mad.wide).
__device__ __forceinline__ uint64_t multiply_add_wide(int32_t a, int32_t b, uint64_t c) {
  uint64_t sum;
  asm volatile("mad.wide.s32 %0, %1, %2, %3;\n" : "=l"(sum) : "r"(a), "r"(b), "l"(c));
  return sum;
}

// The compiler moves no memory access across this point, and reads memory again after it. No instruction is emitted,
// so it does not order accesses for other threads.
__device__ __forceinline__ void compiler_fence() { asm volatile("" ::: "memory"); }

} // namespace fdm::cuda::ptx
