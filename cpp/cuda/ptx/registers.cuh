// SPDX-License-Identifier: BSD-3-Clause
// Values and reads that the compiler must not move, and values whose origin it must not know: its own choice would take
// more registers or instructions.
#pragma once

#include <cstdint>

namespace fdm::cuda::ptx {

// threadIdx.x, read anew each time: the thread's index takes no register in between (PTX ISA, %tid).
__device__ __forceinline__ uint32_t thread_index() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(index));
  return index;
}

// The same pointer, of which the compiler does not know what it was computed from. It adds to the pointer as it is, and
// not to its parts.
template <class T> __device__ __forceinline__ T *opaque(T *pointer) {
  asm("" : "+l"(pointer));
  return pointer;
}

// The same value, of which the compiler knows nothing before this point, each time that it is reached: what follows
// from the value is not computed ahead, for instance before a loop.
__device__ __forceinline__ uint32_t opaque_here(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// a b + c, computed here and in a register of its own (PTX ISA, mad.wide).
__device__ __forceinline__ uint64_t multiply_add_wide(int32_t a, int32_t b, uint64_t c) {
  uint64_t sum;
  asm volatile("mad.wide.s32 %0, %1, %2, %3;\n" : "=l"(sum) : "r"(a), "r"(b), "l"(c));
  return sum;
}

// The compiler moves no access to memory across this point, and reads again what it has read before. This is no
// instruction: it tells other threads nothing.
__device__ __forceinline__ void compiler_fence() { asm volatile("" ::: "memory"); }

} // namespace fdm::cuda::ptx
