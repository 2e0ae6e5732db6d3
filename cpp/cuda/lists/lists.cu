// SPDX-License-Identifier: BSD-3-Clause
// The host side of calls with key lists: makes the route, and the parameters of its kernels.
#include "lists.h"

#include "../host/dispatch.h"
#include "../tile/row_places.cuh"

namespace fdm::cuda {
namespace {

ListParams make_params(const fdm_problem &p, const ListRoute &route, const Alignment &alignment) {
  ListParams params{};
  params.p = p;
  params.factors = ScoreFactors(p);
  params.tiles = route.tiles;
  params.aligned = alignment.inputs;
  params.copies_rows = alignment.inputs && alignment.row_places;
  params.page_rows = params.copies_rows ? RowPlaces(p).page_rows : int32_t(p.k.shape[1]);
  return params;
}

} // namespace

cudaError_t run_list_forward(const fdm_problem &p, const fdm_forward_args &args, const DeviceFacts &device) {
  const Alignment alignment = forward_alignment(p, args);
  const ListRoute route = list_forward_route(p, device, alignment);
  ListParams params = make_params(p, route, alignment);
  params.forward = args;
  return with_kernel_types(p, route.head_dim, [&](auto element, auto dim) {
    using Element = typename decltype(element)::Type;
    return launch_list_forward<Element, dim>({route, params}, static_cast<cudaStream_t>(p.context.stream));
  });
}

cudaError_t run_list_backward(const fdm_problem &p, const fdm_backward_args &args, const DeviceFacts &device,
                              void *workspace) {
  const Alignment alignment = backward_alignment(p, args);
  const ListRoute route = list_backward_route(p, device, alignment);
  const auto stream = static_cast<cudaStream_t>(p.context.stream);
  ListBackwardParams params{};
  static_cast<ListParams &>(params) = make_params(p, route, alignment);
  params.backward = args;
  params.sum_dim = route.head_dim;
  const auto sums = [&](const Part &part, const fdm_tensor &gradient) {
    return present(gradient) ? at<float>(workspace, part) : nullptr;
  };
  params.sums = {sums(route.key_sums, args.dk), sums(route.value_sums, args.dv), sums(route.bias_sums, args.dbias),
                 sums(route.index_sums, args.dindex_bias), sums(route.sink_sums, args.dsink)};
  if (route.key_parts > 1) params.query_sums = sums(route.query_sums, args.dq);
  const ListBackwardLaunch work{route, params};
  if (cudaError_t error = cudaMemsetAsync(workspace, 0, size_t(route.cleared_bytes), stream)) return error;
  const cudaError_t error = with_kernel_types(p, route.head_dim, [&](auto element, auto dim) {
    return launch_list_backward<typename decltype(element)::Type, dim>(work, stream);
  });
  return error ? error : launch_list_rounding(work, stream);
}

} // namespace fdm::cuda
