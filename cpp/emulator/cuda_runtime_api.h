// SPDX-License-Identifier: BSD-3-Clause
// The part of the CUDA runtime API that the packs use. There is one device, whose streams execute work immediately.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "language.h"

#define CUDART_VERSION 13000

using cudaStream_t = struct CUstream_st *;

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotSupported = 801
};
inline const char *cudaGetErrorName(cudaError_t) { return "emulation"; }
inline const char *cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? fdm::emulator::error() : "a call that CUDA refuses";
}

namespace fdm::emulator {
// Whether the calling thread has a context. Its first call that needs one, or that sets the device, creates it.
inline thread_local bool has_context = false;
} // namespace fdm::emulator

inline cudaError_t cudaGetDevice(int *device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) {
  fdm::emulator::has_context = true;
  return cudaSuccess;
}

enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr, int) {
  *value = fdm::emulator::sm_count();
  return cudaSuccess;
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }

// The emulator does not know the names of functions.
inline cudaError_t cudaFuncGetName(const char **, const void *) { return cudaErrorNotSupported; }

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributeNonPortableClusterSizeAllowed };
inline cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int bytes) {
  return bytes <= fdm::emulator::kSharedBytes ? cudaSuccess : cudaErrorInvalidValue;
}

inline cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t) {
  fdm::emulator::has_context = true;
  std::memset(p, value, bytes);
  return cudaSuccess;
}

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
constexpr unsigned long long cudaEnableDefault = 0;
namespace fdm::emulator {
void *driver_function(const char *name);
}
inline cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult *result) {
  *function = fdm::emulator::driver_function(name);
  *result = cudaDriverEntryPointSuccess;
  return *function ? cudaSuccess : cudaErrorNotSupported;
}

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned columns = 1, unsigned rows = 1, unsigned layers = 1) : x(columns), y(rows), z(layers) {}
};

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization, cudaLaunchAttributeClusterDimension };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
    struct {
      unsigned x, y, z;
    } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute *attrs;
  unsigned numAttrs;
};

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Parameters...),
                               const Arguments &...arguments) {
  fdm::emulator::has_context = true;
  const auto size = [](dim3 d) { return fdm::emulator::Index3{d.x, d.y, d.z}; };
  uint32_t cluster = 1;
  for (unsigned n = 0; n < config->numAttrs; ++n)
    if (config->attrs[n].id == cudaLaunchAttributeClusterDimension) cluster = config->attrs[n].val.clusterDim.y;
  const bool done = fdm::emulator::launch({size(config->gridDim), size(config->blockDim), config->dynamicSmemBytes,
                                           [&] { kernel(arguments...); }, cluster});
  return done ? cudaSuccess : cudaErrorLaunchFailure;
}
template <class... Parameters>
cudaError_t cudaOccupancyMaxActiveClusters(int *count, void (*)(Parameters...), const cudaLaunchConfig_t *config) {
  *count = std::max(1, fdm::emulator::sm_count() / int(config->attrs[0].val.clusterDim.y));
  return cudaSuccess;
}
