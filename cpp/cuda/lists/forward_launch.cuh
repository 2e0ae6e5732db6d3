// SPDX-License-Identifier: BSD-3-Clause
// Launches the forward kernels of one instantiation. Generated files include this file and instantiate the function.
#pragma once

#include <utility>

#include "../host/dispatch.h"
#include "../host/launch.cuh"
#include "forward.cuh"

#if FDM_TILE_ARCH == 90
#include "../host/launch_sm90.cuh"
#include "sm90/forward.cuh"
#endif

namespace fdm::cuda {

#if FDM_TILE_ARCH == 90
// The parameters of the persistent kernel, whose rows are heads.
inline ListForwardParamsSm90 list_forward_params_sm90(const ListLaunch &work) {
  ListForwardParamsSm90 params{};
  ForwardParams &forward = params.forward;
  forward.p = work.params.p;
  forward.a = work.params.forward;
  std::swap(forward.p.q.stride[1], forward.p.q.stride[2]);
  std::swap(forward.a.out.stride[1], forward.a.out.stride[2]);
  std::swap(forward.a.lse.stride[1], forward.a.lse.stride[2]);
  std::swap(forward.a.out_rest.stride[1], forward.a.out_rest.stride[2]);
  forward.factors = work.params.factors;
  forward.bias_factor = forward.factors.can_fold_bias() ? 1.0f / forward.factors.scale : 0.0f;
  forward.heads_per_tile = forward.splits = 1;
  forward.rows = RowPlaces(forward.p);
  forward.aligned = true;
  params.tiles = work.route.tiles;
  params.count = work.route.count;
  return params;
}

template <class Element, int kHeadDim>
cudaError_t launch_list_forward_sm90(const ListLaunch &work, cudaStream_t stream) {
  using Config = typename ListForwardSm90<Element, kHeadDim>::Config;
  return launch_sm90<ForwardSharedSm90<Config>, forward_kernel_sm90<ListedColumns<Config>>, Roles::kThreadsWithLookup>(
      list_forward_params_sm90(work), work.route.blocks, stream);
}
#endif

template <class Element, int kHeadDim> cudaError_t launch_list_forward(const ListLaunch &work, cudaStream_t stream) {
#if FDM_TILE_ARCH == 90
  if constexpr (has_list_forward_sm90(kHeadDim))
    if (work.route.kernel == ListKernel::wgmma) return launch_list_forward_sm90<Element, kHeadDim>(work, stream);
#endif
  const auto start = [&](auto config) {
    using Config = typename decltype(config)::Type;
    return launch_with_shared<ListForwardShared<Config>, list_forward_kernel<Config>>(work.params, work.route.blocks,
                                                                                      Config::kThreads, stream);
  };
  switch (work.route.heads) {
  case ListHeads::up_to_16:
    return start(TypeOf<ListConfigOf<Element, kHeadDim, list_forward_tile, ListHeads::up_to_16>>{});
  case ListHeads::up_to_32:
    return start(TypeOf<ListConfigOf<Element, kHeadDim, list_forward_tile, ListHeads::up_to_32>>{});
  case ListHeads::up_to_64:
    return start(TypeOf<ListConfigOf<Element, kHeadDim, list_forward_tile, ListHeads::up_to_64>>{});
  default:
    return start(TypeOf<ListConfigOf<Element, kHeadDim, list_forward_tile, ListHeads::any>>{});
  }
}

} // namespace fdm::cuda
