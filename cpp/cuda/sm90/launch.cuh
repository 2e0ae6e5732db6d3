// SPDX-License-Identifier: BSD-3-Clause
// The launch of the Hopper kernels.
#pragma once

#include "../attention/device.h"
#include "../attention/tiles.cuh"
#include "../ptx/dependent.cuh"
#include "roles.cuh"

namespace fdm::cuda::sm90 {

// kKernel(params) with the shared memory that `Shared` needs. The kernel waits for the one ahead itself.
template <class Shared, auto kKernel, class Params>
cudaError_t launch(const Params &params, int64_t blocks, cudaStream_t stream) {
  constexpr int bytes = int(sizeof(Shared));
  static_assert(bytes <= shared_limit(90), "the tile does not fit the arch's shared memory");
  static std::atomic<uint64_t> allowed{0};
  if (cudaError_t error = allow_shared(kKernel, bytes, allowed)) return error;
  return launch_dependent(kKernel, unsigned(blocks), Roles::kThreads, bytes, stream, params);
}

// Of a kernel whose blocks stay: one for each multiprocessor, as long as there are tiles.
template <class Shared, auto kKernel, class Params>
cudaError_t launch_staying(const Params &params, int64_t tiles, cudaStream_t stream) {
  int most;
  if (cudaError_t error = multiprocessors(&most)) return error;
  return launch<Shared, kKernel>(params, tiles < most ? tiles : most, stream);
}

} // namespace fdm::cuda::sm90
