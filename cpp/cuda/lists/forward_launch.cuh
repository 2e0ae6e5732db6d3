// SPDX-License-Identifier: BSD-3-Clause
// The launch of the forward kernels of one instantiation. Generated files hold nothing but an include of this and a line for each.
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
// The parameters of the persistent kernel, to which heads are rows.
inline ListForwardParamsSm90 list_forward_params_sm90(const ListLaunch &work) {
  ListForwardParamsSm90 params{};
  ForwardParams &own = params.forward;
  own.p = work.params.p;
  own.a = work.params.forward;
  std::swap(own.p.q.stride[1], own.p.q.stride[2]);
  std::swap(own.a.out.stride[1], own.a.out.stride[2]);
  std::swap(own.a.lse.stride[1], own.a.lse.stride[2]);
  own.a.out_rest = {}; // none is asked for
  own.factors = work.params.factors;
  own.bias_factor = own.factors.may_begin_with_bias() ? 1.0f / own.factors.scale : 0.0f;
  own.heads_per_tile = own.splits = 1;
  own.rows = RowPlaces(own.p);
  own.aligned = true;
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
  if (work.route.heads == ListHeads::few)
    return start(TypeOf<ListConfigOf<Element, kHeadDim, list_forward_tile, ListHeads::few>>{});
  return start(TypeOf<ListConfigOf<Element, kHeadDim, list_forward_tile, ListHeads::many>>{});
}

} // namespace fdm::cuda
