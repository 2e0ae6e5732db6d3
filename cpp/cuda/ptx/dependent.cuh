// SPDX-License-Identifier: BSD-3-Clause
// Programmatic dependent launch: a kernel starts before the kernel ahead of it in the stream has ended (PTX ISA:
// griddepcontrol; sm_90 and later).
//
// Before sm_90 these functions do nothing, and launch.cuh launches Overlap::kernel_ahead kernels the ordinary way.
// After an ordinary launch they do nothing either. Data that such a kernel reads before, or without,
// wait_for_kernel_ahead must be complete when the last ordinarily launched kernel ahead of it starts.
#pragma once

#include <cstdint>

namespace fdm::cuda::ptx {

// Test builds (FLASH_DMATTN_DELAYS) wait here for up to 64 microseconds, a different time for each block and point.
// Kernels of a chain then overlap in rare ways, and tests find kernels that read data before the kernel ahead has
// written it.
__device__ __forceinline__ void delay([[maybe_unused]] uint32_t point) {
#ifdef FDM_DELAYS
  uint32_t number = (blockIdx.x + 0x9e37u * blockIdx.y + 0x85ebu * gridDim.x + point) * 0x9e3779b1u;
  number ^= number >> 15;
  for (uint32_t n = 0; n < number % 64; ++n) __nanosleep(1000);
#endif
}

// The next kernel of the stream may start from here on, if it was launched with Overlap::kernel_ahead.
__device__ __forceinline__ void start_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
  delay(1);
#endif
}

// Waits until the kernel ahead has ended and its writes are visible. In every kernel launched with
// Overlap::kernel_ahead, at least one thread must call this. So when a kernel has ended, all kernels ahead of it have
// ended too.
__device__ __forceinline__ void wait_for_kernel_ahead() {
#if __CUDA_ARCH__ >= 900
  delay(2);
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
  delay(3);
#endif
}

} // namespace fdm::cuda::ptx
