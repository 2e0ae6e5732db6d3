// SPDX-License-Identifier: BSD-3-Clause
// The launch of the Hopper kernels.
#pragma once

#include "../tile/sm90/roles.cuh"
#include "launch.cuh"

namespace fdm::cuda {

// Launches kKernel(params) with the shared memory that `Shared` needs. The kernel waits for the one ahead itself.
template <class Shared, auto kKernel, int kThreads = Roles::kThreads, class Params>
cudaError_t launch_sm90(const Params &params, int64_t blocks, cudaStream_t stream) {
  return launch_with_shared<Shared, kKernel, Overlap::kernel_ahead>(params, blocks, kThreads, stream);
}

// Launches a persistent kernel: one block for each SM, but no more than there are tiles.
template <class Shared, auto kKernel, int kThreads = Roles::kThreads, class Params>
cudaError_t launch_persistent_sm90(const Params &params, int64_t tiles, cudaStream_t stream) {
  int most;
  if (cudaError_t error = sm_count(&most)) return error;
  return launch_sm90<Shared, kKernel, kThreads>(params, tiles < most ? tiles : most, stream);
}

} // namespace fdm::cuda
