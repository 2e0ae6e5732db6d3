// SPDX-License-Identifier: BSD-3-Clause
// The launch of all kernels: checks the grid, requests shared memory, and permits programmatic dependent launches.
#pragma once

#include <cuda_runtime.h>

#include <climits>

#include "../tile/tile_sizes.cuh"
#include "device.h"
#include "launch_counts.h"

namespace fdm::cuda {

// The grid in 64-bit numbers: a product of valid sizes may exceed the limits of the driver.
struct Grid {
  int64_t x, y = 1;
  int64_t cluster = 1; // thread blocks of a column in a cluster (sm_90): 1, or all of the column

  Grid(int64_t columns, int64_t rows = 1, int64_t in_cluster = 1) : x(columns), y(rows), cluster(in_cluster) {}
};

// Makes the blocks of a column of the grid a cluster.
inline cudaLaunchAttribute cluster_of(int64_t blocks) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = cluster.val.clusterDim.z = 1;
  cluster.val.clusterDim.y = unsigned(blocks);
  return cluster;
}

// kernel_ahead makes a programmatic dependent launch (ptx/dependent.cuh); before sm_90, an ordinary one.
enum class Overlap { none, kernel_ahead };

template <Overlap kOverlap = Overlap::none, class... Parameters>
cudaError_t launch(void (*kernel)(Parameters...), Grid grid, int threads, int shared_bytes, cudaStream_t stream,
                   const Parameters &...parameters) {
  if (grid.x == 0 || grid.y == 0) return cudaSuccess;
  // The limits of every arch (CUDA programming guide, compute capabilities).
  if (grid.x > INT_MAX || grid.y > 65535) return cudaErrorInvalidConfiguration;
  cudaLaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (kOverlap == Overlap::kernel_ahead && FDM_ARCH >= 90) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster > 1) attributes[count++] = cluster_of(grid.cluster);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(grid.x), unsigned(grid.y));
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = size_t(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, parameters...);
  if (!error) launch_counts.add(reinterpret_cast<const void *>(kernel));
  return error;
}

// Launches a kernel whose dynamic shared memory is a `Shared`, which may exceed the default limit of 48 KB.
template <class Shared, auto kKernel, Overlap kOverlap = Overlap::none, class Params>
cudaError_t launch_with_shared(const Params &params, Grid grid, int threads, cudaStream_t stream) {
  constexpr int bytes = int(sizeof(Shared));
  static_assert(bytes <= shared_limit(FDM_TILE_ARCH), "the tile does not fit the arch's shared memory");
  if (cudaError_t error = allow_shared<kKernel>(bytes)) return error;
  return launch<kOverlap>(kKernel, grid, threads, bytes, stream, params);
}

// Returns in `clusters` the number of clusters of `blocks` blocks that can be resident at once, with one block per SM.
// The blocks of a cluster need SMs of the same GPC, so there are fewer than SMs / blocks, or none if every GPC has
// fewer SMs. Calls the driver once for each kernel. For more than 8 blocks, callers must call this before the launch.
template <class Shared, auto kKernel> cudaError_t max_clusters(int blocks, int threads, int64_t *clusters) {
  constexpr int kBlockRoom = 16, kPortable = 8; // CUDA programming guide, thread block clusters
  static std::atomic<int> known[kMaxDevices][kBlockRoom + 1];
  int device;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  // 0: unknown; otherwise the number plus 1.
  int found = device < kMaxDevices ? known[device][blocks].load(std::memory_order_relaxed) : 0;
  if (found == 0) {
    if (cudaError_t error = allow_shared<kKernel>(int(sizeof(Shared)))) return error;
    if (blocks > kPortable) {
      const auto kernel = reinterpret_cast<const void *>(kKernel);
      if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1))
        return error;
    }
    cudaLaunchAttribute cluster = cluster_of(blocks);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(1, unsigned(blocks));
    config.blockDim = dim3(unsigned(threads));
    config.dynamicSmemBytes = sizeof(Shared);
    config.attrs = &cluster;
    config.numAttrs = 1;
    int count = 0;
    if (cudaError_t error = cudaOccupancyMaxActiveClusters(&count, kKernel, &config)) {
      if (blocks <= kPortable) return error;
      cudaGetLastError(); // a device without support for such clusters has none
      count = 0;
    }
    found = count + 1;
    if (device < kMaxDevices) known[device][blocks].store(found, std::memory_order_relaxed);
  }
  *clusters = found - 1;
  return cudaSuccess;
}

} // namespace fdm::cuda
