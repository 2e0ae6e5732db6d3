// SPDX-License-Identifier: BSD-3-Clause
// Launches the backward kernels of one instantiation. Generated files include this file and instantiate the function.
#pragma once

#include "../host/dispatch.h"
#include "../host/launch.cuh"
#include "backward.cuh"

#if FDM_TILE_ARCH == 90
#include "../host/launch_sm90.cuh"
#include "sm90/backward.cuh"
#endif

namespace fdm::cuda {

template <class Element, int kHeadDim>
cudaError_t launch_list_backward(const ListBackwardLaunch &work, cudaStream_t stream) {
#if FDM_TILE_ARCH == 90
  if constexpr (has_list_backward_sm90(kHeadDim)) {
    using Config = ListBackwardConfigSm90<Element, kHeadDim>;
    if (work.route.kernel == ListKernel::wgmma)
      return launch_sm90<ListBackwardSharedSm90<Config>, list_backward_kernel_sm90<Config>>(work.params,
                                                                                            work.route.blocks, stream);
  }
#endif
  const auto start = [&](auto config) {
    using Config = typename decltype(config)::Type;
    ListBackwardParams params = work.params;
    for (int64_t first = 0, n = 0; first < work.route.blocks; first += work.route.pass_blocks)
      for (int64_t part = 0; part < work.route.key_parts; ++part, ++n) {
        params.pass = work.route.pass(n);
        if (cudaError_t error = launch_with_shared<ListBackwardShared<Config>, list_backward_kernel<Config>>(
                params, work.route.pass_blocks, Config::kThreads, stream))
          return error;
      }
    return cudaSuccess;
  };
  if (work.route.heads <= ListHeads::up_to_32 || kHeadDim > 128)
    return start(TypeOf<ListConfigOf<Element, kHeadDim, list_backward_tile, ListHeads::up_to_16>>{});
  return start(TypeOf<ListConfigOf<Element, kHeadDim, list_backward_tile, ListHeads::any>>{});
}

} // namespace fdm::cuda
