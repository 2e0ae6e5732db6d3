// SPDX-License-Identifier: BSD-3-Clause
// Calls whose queries list their keys, on the host: what the kernels are given. The route tells which ones.
#include "lists.h"

#include "../host/dispatch.h"

namespace fdm::cuda {
namespace {

ListParams make_params(const fdm_problem &p, const ListRoute &route, const Alignment &lies) {
  ListParams params{};
  params.p = p;
  params.factors = ScoreFactors(p);
  params.heads_per_tile = route.heads_per_tile;
  params.head_tiles = route.head_tiles;
  params.aligned = lies.inputs;
  return params;
}

} // namespace

cudaError_t run_list_forward(const fdm_problem &p, const fdm_forward_args &args, const DeviceFacts &device) {
  const ListRoute route = list_forward_route(p, device);
  ListParams params = make_params(p, route, forward_alignment(p, args));
  params.forward = args;
  return with_kernel_types(p, [&](auto element, auto dim) {
    using Element = typename decltype(element)::Type;
    return launch_list_forward<Element, decltype(dim)::value>({route, params},
                                                              static_cast<cudaStream_t>(p.context.stream));
  });
}

} // namespace fdm::cuda
