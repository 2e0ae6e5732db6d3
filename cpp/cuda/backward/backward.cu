// SPDX-License-Identifier: BSD-3-Clause
// The host side of the backward pass. It fills in the parameters of the route's kernels and launches them in order.
#include "backward.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "../host/dispatch.h"
#include "../host/fill.h"
#include "../host/relative_bias.h"
#include "../host/way_counts.h"
#include "../pair_bias/pair_bias.h"
#include "../plan/make_plan.h"
#include "../route/members.h"

namespace fdm::cuda {
namespace {

BackwardParams make_params(const fdm_problem &p, const fdm_backward_args &args, const BackwardRoute &route,
                           const void *plan, void *workspace) {
  BackwardParams params{};
  params.p = p;
  params.a = args;
  params.plan = plan_of(p, plan);
  params.group = int32_t(group_size(p));
  params.statistics = at<RowStatistics>(workspace, route.statistics);
  params.sink_shares = at<float>(workspace, route.sink_shares);
  KeyWork &keys = params.keys;
  static_cast<KeyDivision &>(keys) = route.division;
  keys.ordered = at<KeyRows>(workspace, route.ordered);
  keys.ranges = at<RowRange>(workspace, route.ranges);
  keys.items = at<KeyItem>(workspace, route.items);
  keys.item_count = at<int32_t>(workspace, route.item_count);
  keys.part_sums = at<float>(workspace, route.part_sums);
  KeySegments &segments = keys.segments;
  static_cast<SegmentWork &>(segments) = route.segments;
  segments.kept_count = at<int32_t>(workspace, route.segment_kept);
  segments.order = at<SegmentBlock>(workspace, route.segment_order);
  segments.sums = at<float>(workspace, route.segment_sums);
  segments.bias_sums = at<float>(workspace, route.segment_bias_sums);
  segments.sum_keys = at<int32_t>(workspace, route.segment_keys);
  segments.sum_count = at<int32_t>(workspace, route.segment_counts);
  static_cast<QuerySumWork &>(params.query_sums) = route.query_sums;
  params.query_sums.data = at<float>(workspace, route.query_sum_data);
  params.bias_heads = route.bias_heads;
  params.wants_bias_sums = route.wants_bias_sums;
  params.reduces_bias = route.reduces_bias;
  if (route.wants_bias_sums && !route.reduces_bias) {
    params.bias_sums = args.dbias;
  } else if (route.bias_sums.exists()) {
    const int64_t heads = p.kv_heads * route.bias_heads, keys_of_list = total_keys(p);
    params.bias_sums = {at<float>(workspace, route.bias_sums),
                        {is_varlen(p) ? 1 : p.batch, heads, 1, keys_of_list},
                        {heads * keys_of_list, keys_of_list, 0, 1},
                        FDM_FLOAT32,
                        0};
  }
  params.clears_keys = route.clears_key_gradients;
  params.follows_dq = route.query_kernel != QueryKernel::none;
  params.order = route.order;
  return params;
}

// Runs steps in order until one fails.
template <class... Steps> cudaError_t run_all(const Steps &...steps) {
  cudaError_t error = cudaSuccess;
  (void)((error = steps(), error == cudaSuccess) && ...);
  return error;
}

cudaError_t run_key_gradients(const BackwardLaunch &work, cudaStream_t stream) {
  const BackwardRoute &route = work.route;
  return run_all(
      [&] {
        return with_kernel_types(work.params.p, route.head_dim, [&](auto element, auto dim) {
          return launch_dkdv<typename decltype(element)::Type, dim>(work, stream);
        });
      },
      [&] { return route.query_sum_data.exists() ? launch_query_sums(work, stream) : cudaSuccess; },
      [&] { return route.division.stored_parts > 0 ? launch_key_sum(work, stream) : cudaSuccess; },
      [&] { return route.segments.max_sums > 0 ? launch_key_segment_sums(work, stream) : cudaSuccess; },
      [&] { return route.reduces_bias ? launch_bias_reduce(work, stream) : cudaSuccess; });
}

// The dk or dv of a member of the groups. It has no data if the gradient is not wanted.
fdm_tensor member_gradient(const fdm_problem &p, const fdm_tensor &wanted, uint16_t *parts, int64_t member) {
  const int64_t pitch = member_pitch(p), row = p.kv_heads * pitch;
  fdm_tensor gradient = wanted;
  gradient.data = present(wanted) ? parts + member * member_elements(p) : nullptr;
  const int64_t strides[4] = {wanted.shape[1] * row, row, pitch, 1};
  std::copy(strides, strides + 4, gradient.stride);
  return gradient;
}

cudaError_t run_members(const fdm_problem &p, const fdm_backward_args &args, const DeviceFacts &device,
                        const BackwardRoute &route, void *workspace, cudaStream_t stream) {
  void *plan = at<void>(workspace, route.member_plan), *plan_work = at<void>(workspace, route.member_plan_work);
  for (int32_t member = 0; member < route.members; ++member) {
    const fdm_problem member_problem = member_of(p, member);
    fdm_backward_args own_args = member_of(p, args, member);
    own_args.dk = member_gradient(p, args.dk, at<uint16_t>(workspace, route.member_keys), member);
    own_args.dv = member_gradient(p, args.dv, at<uint16_t>(workspace, route.member_values), member);
    const cudaError_t error =
        run_all([&] { return make_plan(member_problem, plan_of(member_problem, plan), device, plan_work, stream); },
                [&] { return run_backward(member_problem, own_args, device, plan, workspace); });
    if (error) return error;
  }
  return launch_member_sums(p, args, route, workspace, stream);
}

cudaError_t run_gradients(const BackwardLaunch &work, cudaStream_t stream) {
  const BackwardRoute &route = work.route;
  const fdm_problem &p = work.params.p;
  const fdm_backward_args &args = work.params.a;
  return run_all([&] { return route.clears_dq ? launch_fill_zero(args.dq, stream) : cudaSuccess; },
                 [&] { return route.clears_dbias ? launch_fill_zero(args.dbias, stream) : cudaSuccess; },
                 [&] { return launch_prepare(work, stream); },
                 [&] { return route.scheduled ? launch_key_schedule(work.params, stream) : cudaSuccess; },
                 [&] {
                   if (route.query_kernel == QueryKernel::none) return cudaSuccess;
                   return with_kernel_types(p, route.head_dim, [&](auto element, auto dim) {
                     return launch_dq<typename decltype(element)::Type, dim>(work, stream);
                   });
                 },
                 [&] { return route.wants_key_gradients ? run_key_gradients(work, stream) : cudaSuccess; },
                 [&] {
                   if (route.row_bias_blocks == 0) return cudaSuccess;
                   return with_types<kMaxRareHeadDim>(p, route.head_dim, RareHeadDims{}, [&](auto element, auto dim) {
                     return launch_row_bias<typename decltype(element)::Type, dim>(work, stream);
                   });
                 },
                 [&] { return present(args.dsink) ? launch_sink_reduce(work, stream) : cudaSuccess; });
}

// Calls `pass` with the parameters. For a float64 bias, the biases, lse and dlse in them are relative to references.
template <class Pass>
cudaError_t with_params(const fdm_problem &p, const fdm_backward_args &args, const BackwardRoute &route,
                        const void *plan, void *workspace, const Pass &pass) {
  if (!route.relative.biases.exists()) return pass(make_params(p, args, route, plan, workspace));
  const auto stream = static_cast<cudaStream_t>(p.context.stream);
  const RelativeProblem relative(p, route.relative, workspace);
  fdm_backward_args relative_args = args;
  relative_args.lse = relative.lse();
  if (present(args.dlse)) relative_args.dlse = relative.dlse();
  BackwardParams params = make_params(relative.problem(), relative_args, route, plan, workspace);
  params.absolute_lse = args.lse;
  return run_all([&] { return relative.launch_references(params.plan, stream); },
                 [&] { return relative.launch_relative_lse(args.lse, args.dlse, stream); },
                 [&] { return pass(params); });
}

} // namespace

cudaError_t run_backward(const fdm_problem &p, const fdm_backward_args &args, const DeviceFacts &device,
                         const void *plan, void *workspace) {
  const Alignment alignment = backward_alignment(p, args);
  const BackwardRoute route = backward_route(p, device, alignment, requested_gradients(args));
  if (has_narrow_values(p) && !route.takes_narrow_values()) return cudaErrorNotSupported;
  route_counts.add_backward(backward_route_kind(route));
  const auto stream = static_cast<cudaStream_t>(p.context.stream);
  if (route.nothing)
    return run_all([&] { return launch_fill_zero(args.dq, stream); }, [&] { return launch_fill_zero(args.dk, stream); },
                   [&] { return launch_fill_zero(args.dv, stream); },
                   [&] { return launch_fill_zero(args.dbias, stream); },
                   [&] { return launch_fill_zero(args.dsink, stream); });
  if (route.is_pair_bias) return run_pair_bias_backward(p, args, route.pair_bias, alignment, workspace);
  if (route.too_large) return cudaErrorInvalidConfiguration;
  if (route.members > 0) return run_members(p, args, device, route, workspace, stream);
  return with_params(p, args, route, plan, workspace,
                     [&](const BackwardParams &params) { return run_gradients({route, params}, stream); });
}

cudaError_t run_key_mass(const fdm_problem &p, const fdm_key_mass_args &args, const DeviceFacts &device,
                         const void *plan, void *workspace) {
  const BackwardRoute route = key_mass_route(p, device, input_alignment(p));
  const auto stream = static_cast<cudaStream_t>(p.context.stream);
  const fdm_tensor &mass = args.mass;
  if (route.nothing) return launch_fill_zero(mass, stream);
  if (route.too_large) return cudaErrorInvalidConfiguration;
  constexpr fdm_tensor kAbsent{nullptr, {1, 1, 1, 1}, {0, 0, 0, 0}, FDM_FLOAT32, 0};
  fdm_backward_args mass_args{};
  mass_args.struct_size = sizeof mass_args;
  mass_args.dout = p.q; // its tensor map is never used
  mass_args.out = p.q;
  mass_args.out.shape[3] = 0; // no columns of out and dout are read: no kernel uses delta
  mass_args.lse = args.lse;
  mass_args.dlse = mass_args.dq = mass_args.dk = mass_args.dv = mass_args.dsink = kAbsent;
  mass_args.dbias = {mass.data,
                     {mass.shape[0], mass.shape[1], 1, mass.shape[2]},
                     {mass.stride[0], mass.stride[1], 0, mass.stride[2]},
                     FDM_FLOAT32,
                     0};
  return with_params(p, mass_args, route, plan, workspace, [&](BackwardParams params) {
    params.only_mass = true;
    const BackwardLaunch work{route, params};
    return run_all([&] { return launch_prepare(work, stream); },
                   [&] { return route.scheduled ? launch_key_schedule(params, stream) : cudaSuccess; },
                   [&] { return run_key_gradients(work, stream); });
  });
}

} // namespace fdm::cuda
