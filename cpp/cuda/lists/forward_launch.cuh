// SPDX-License-Identifier: BSD-3-Clause
// The launch of the forward kernels of one instantiation. Generated files hold nothing but an include of this and a line for each.
#pragma once

#include "../host/dispatch.h"
#include "../host/launch.cuh"
#include "forward.cuh"

namespace fdm::cuda {

template <class Element, int kHeadDim> cudaError_t launch_list_forward(const ListLaunch &work, cudaStream_t stream) {
  const auto start = [&](auto config) {
    using Config = typename decltype(config)::Type;
    return launch_with_shared<ListForwardShared<Config>, list_forward_kernel<Config>>(work.params, work.route.blocks,
                                                                                      Config::kThreads, stream);
  };
  if (work.route.heads == ListHeads::few)
    return start(TypeOf<ListConfigOf<Element, kHeadDim, list_forward_tile, ListHeads::few>>{});
  return start(TypeOf<ListConfigOf<Element, kHeadDim, list_forward_tile, ListHeads::many>>{});
}

} // namespace fdm::cuda
