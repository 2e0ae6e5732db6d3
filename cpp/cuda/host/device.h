// SPDX-License-Identifier: BSD-3-Clause
// Device facts that do not change and are queried once.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>

namespace fdm::cuda {

constexpr int kMaxDevices = 64;

// Lets a kernel use `bytes` of dynamic shared memory on the current device. Calls the driver once for each kernel and
// device, so a kernel always needs the same number.
template <auto kKernel> cudaError_t allow_shared(int bytes) {
  static std::atomic<uint64_t> done{0};
  int device;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  const uint64_t bit = device < kMaxDevices ? uint64_t(1) << device : 0;
  if (bit && done.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(reinterpret_cast<const void *>(kKernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (!error) done.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

} // namespace fdm::cuda
