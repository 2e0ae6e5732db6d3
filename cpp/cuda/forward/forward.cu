// SPDX-License-Identifier: BSD-3-Clause
// The host side of the forward pass: fills in the parameters of the kernel that the route names, and launches it.
#include "forward.h"

#include "../host/dispatch.h"
#include "../host/fill.h"
#include "../host/relative_bias.h"
#include "../host/row_map.h"
#include "../host/way_counts.h"
#include "../pair_bias/pair_bias.h"
#include "decode.h"
#include "sm90/box_params.cuh"

namespace fdm::cuda {
namespace {

// Makes the tensor maps of a route. Returns false if TMA does not support a tensor's strides.
bool make_boxes(const fdm_problem &p, const ForwardRoute &route, BoxMaps *maps) {
  return make_row_map(p.q, p.head_dim, route.tile_rows, &maps->q) &&
         make_row_map(p.k, p.head_dim, route.tile_columns, &maps->k) &&
         make_row_map(p.v, p.v.shape[3], route.tile_columns, &maps->v);
}

ForwardParams make_params(const fdm_problem &p, const fdm_forward_args &args, const ForwardRoute &route,
                          const Alignment &alignment, const void *plan, void *workspace) {
  ForwardParams params{};
  params.p = p;
  params.a = args;
  params.plan = plan_of(p, plan);
  params.factors = ScoreFactors(p);
  params.bias_factor = params.factors.can_fold_bias() ? 1.0f / params.factors.scale : 0.0f;
  params.heads_per_tile = route.heads_per_tile;
  params.heads_reciprocal = 65536u / uint32_t(route.heads_per_tile) + 1;
  params.tiles = route.tiles;
  params.order = route.order;
  params.finds_keys = route.finds_keys;
  params.splits = route.splits;
  params.merges_in_cluster = route.merges_in_cluster;
  if (route.partials.exists()) params.partials = partials_at(at<void>(workspace, route.partials), p, route.splits);
  params.tickets = at<uint32_t>(workspace, route.tickets);
  params.rows = RowPlaces(p);
  params.aligned = alignment.inputs && alignment.out;
  return params;
}

cudaError_t run_columns(const fdm_problem &p, const fdm_forward_args &args, const ForwardRoute &route,
                        const Alignment &alignment, const BoxMaps &maps, const void *plan, void *workspace) {
  const auto stream = static_cast<cudaStream_t>(p.context.stream);
  const ForwardParams params = make_params(p, args, route, alignment, plan, workspace);
  if (params.tickets)
    if (cudaError_t error = cudaMemsetAsync(params.tickets, 0, sizeof(uint32_t), stream)) return error;
  const cudaError_t error = with_kernel_types(p, route.head_dim, [&](auto element, auto dim) {
    using Element = typename decltype(element)::Type;
    const ForwardLaunch work{route, params, &maps};
    return route.kernel == ForwardKernel::decode ? launch_decode<Element, dim>(work, stream)
                                                 : launch_forward<Element, dim>(work, stream);
  });
  if (error || !route.partials.exists()) return error;
  return launch_combine(p, args, route, params.partials, stream);
}

} // namespace

cudaError_t run_forward(const fdm_problem &p, const fdm_forward_args &args, const DeviceFacts &device, const void *plan,
                        void *workspace) {
  const auto stream = static_cast<cudaStream_t>(p.context.stream);
  Alignment alignment = forward_alignment(p, args);
  ForwardRoute route = forward_route(p, device, alignment, args.splits);
  BoxMaps maps;
  if (route.copies_boxes() && !make_boxes(p, route, &maps)) {
    alignment.row_maps = false;
    route = forward_route(p, device, alignment, args.splits);
  }
  if (has_narrow_values(p) && !route.takes_narrow_values()) return cudaErrorNotSupported;
  if (route.too_large) return cudaErrorInvalidConfiguration;
  route_counts.add_forward(forward_route_kind(route, p));
  if (is_varlen(p))
    if (cudaError_t error = launch_unused_rows(p, args, route.unused_rows, stream)) return error;
  if (route.kernel == ForwardKernel::none) return cudaSuccess;
  if (route.is_pair_bias()) return run_pair_bias_forward(p, args, route, alignment, workspace);
  if (route.kernel == ForwardKernel::direct) return run_direct_decode(p, args, route, device, workspace);
  if (!route.relative.biases.exists()) return run_columns(p, args, route, alignment, maps, plan, workspace);
  const RelativeProblem relative(p, route.relative, workspace);
  fdm_forward_args relative_args = args;
  relative_args.lse = relative.lse();
  if (cudaError_t error = relative.launch_references(plan_of(p, plan), stream)) return error;
  if (cudaError_t error = run_columns(relative.problem(), relative_args, route, alignment, maps, plan, workspace))
    return error;
  return relative.launch_absolute_lse(args.lse, stream);
}

} // namespace fdm::cuda
