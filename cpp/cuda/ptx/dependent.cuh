// SPDX-License-Identifier: BSD-3-Clause
// Kernels that are launched before the one ahead of them has ended (PTX ISA, griddepcontrol; sm_90 and later).
//
// Before that arch these do nothing, and launch_dependent makes an ordinary launch. After an ordinary launch they do
// nothing either.
#pragma once

#include <cuda_runtime.h>

namespace fdm::ptx {

// From here on the next kernel of the stream may start, if it was launched by launch_dependent.
__device__ __forceinline__ void start_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

// Waits until the kernel ahead has ended and what it wrote can be read. In every kernel that is launched by
// launch_dependent at least one thread must call this, so that the end of a kernel is also that of all ahead of it.
__device__ __forceinline__ void wait_for_kernel_ahead() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

} // namespace fdm::ptx

namespace fdm::cuda {

// Launches a kernel that calls wait_for_kernel_ahead. What it reads before, or without, that must have been there when
// the last kernel ahead of it that was launched the ordinary way started.
template <class... Parameters>
cudaError_t launch_dependent(void (*kernel)(Parameters...), dim3 blocks, int threads, int shared_bytes,
                             cudaStream_t stream, const Parameters &...parameters) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks, config.blockDim = dim3(unsigned(threads)), config.stream = stream;
  config.dynamicSmemBytes = size_t(shared_bytes);
  config.attrs = &early, config.numAttrs = FDM_ARCH >= 90 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, parameters...);
}

} // namespace fdm::cuda
