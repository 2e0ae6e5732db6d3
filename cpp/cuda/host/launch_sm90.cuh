// SPDX-License-Identifier: BSD-3-Clause
// The launch of the Hopper kernels.
#pragma once

#include <type_traits>

#include "../tile/sm90/roles.cuh"
#include "../tile/sm90/tile_sizes.cuh"
#include "dispatch.h"
#include "launch.cuh"

namespace fdm::cuda {

// Launches kKernel(params) with the shared memory of `Shared`. The kernel itself waits for the kernel ahead of it.
template <class Shared, auto kKernel, int kThreads = Roles::kThreads, class Params>
cudaError_t launch_sm90(const Params &params, int64_t blocks, cudaStream_t stream) {
  return launch_with_shared<Shared, kKernel, Overlap::kernel_ahead>(params, blocks, kThreads, stream);
}

// Calls function(std::integral_constant<int, d>) with the value dimension of a route.
template <int kHeadDim, class Function> cudaError_t with_value_dim(int value_dim, const Function &function) {
  if constexpr (narrow_value_dim(kHeadDim) > 0)
    if (value_dim < kHeadDim) return function(constant<narrow_value_dim(kHeadDim)>);
  return function(constant<kHeadDim>);
}

} // namespace fdm::cuda
