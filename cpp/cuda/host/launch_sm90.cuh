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

} // namespace fdm::cuda
