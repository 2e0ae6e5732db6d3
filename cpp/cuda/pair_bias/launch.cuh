// SPDX-License-Identifier: BSD-3-Clause
// Launches the pair bias kernels, whose shared memory depends on the problem.
#pragma once

#include "../host/launch.cuh"
#include "sources.cuh"
#include "tile_sizes.cuh"

namespace fdm::cuda {

template <auto kKernel, class Params>
cudaError_t launch_pair_bias(const Params &params, int64_t blocks, int threads, int shared_bytes, cudaStream_t stream) {
  if (shared_bytes > kPairBiasSharedLimit) return cudaErrorInvalidConfiguration;
  if (cudaError_t error = allow_shared<kKernel>(kPairBiasSharedLimit)) return error;
  return launch(kKernel, blocks, threads, shared_bytes, stream, params);
}

} // namespace fdm::cuda
