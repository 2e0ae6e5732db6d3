// SPDX-License-Identifier: BSD-3-Clause
// Kernels that are launched before the one ahead of them has ended (PTX ISA, griddepcontrol; sm_90 and later).
//
// Before that arch these do nothing, and launch.cuh makes an ordinary launch of what is marked Overlap::kernel_ahead.
// After an ordinary launch they do nothing either. What such a kernel reads before, or without, wait_for_kernel_ahead
// must have been there when the last kernel ahead of it that was launched the ordinary way started.
#pragma once

#include <cstdint>

namespace fdm::cuda::ptx {

// A build for tests (FLASH_DMATTN_DELAYS) waits here for up to 64 microseconds, different for each block and point.
// Kernels of a chain then overlap in ways in which they seldom do, and tests find a kernel that reads what the kernel
// ahead has not written yet.
__device__ __forceinline__ void delay([[maybe_unused]] uint32_t point) {
#ifdef FDM_DELAYS
  uint32_t number = (blockIdx.x + 0x9e37u * blockIdx.y + 0x85ebu * gridDim.x + point) * 0x9e3779b1u;
  number ^= number >> 15;
  for (uint32_t n = 0; n < number % 64; ++n) __nanosleep(1000);
#endif
}

// From here on the next kernel of the stream may start, if it was launched with Overlap::kernel_ahead.
__device__ __forceinline__ void start_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
  delay(1);
#endif
}

// Waits until the kernel ahead has ended and what it wrote can be read. In every kernel that is launched with
// Overlap::kernel_ahead at least one thread must call this. When a kernel has ended, all kernels ahead of it have ended
// too.
__device__ __forceinline__ void wait_for_kernel_ahead() {
#if __CUDA_ARCH__ >= 900
  delay(2);
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
  delay(3);
#endif
}

} // namespace fdm::cuda::ptx
