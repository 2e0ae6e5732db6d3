// SPDX-License-Identifier: BSD-3-Clause
// The launch of the Hopper kernels.
#pragma once

#include "../launch.cuh"
#include "roles.cuh"

namespace fdm::cuda::sm90 {

// kKernel(params) with the shared memory that `Shared` needs. The kernel waits for the one ahead itself.
template <class Shared, auto kKernel, class Params>
cudaError_t launch(const Params &params, int64_t blocks, cudaStream_t stream) {
  return launch_with_shared<Shared, kKernel, Overlap::kernel_ahead>(params, blocks, Roles::kThreads, stream);
}

// Of a kernel whose blocks stay: one for each multiprocessor, as long as there are tiles.
template <class Shared, auto kKernel, class Params>
cudaError_t launch_staying(const Params &params, int64_t tiles, cudaStream_t stream) {
  int most;
  if (cudaError_t error = multiprocessors(&most)) return error;
  return launch<Shared, kKernel>(params, tiles < most ? tiles : most, stream);
}

} // namespace fdm::cuda::sm90
