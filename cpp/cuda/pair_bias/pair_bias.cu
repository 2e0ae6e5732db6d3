// SPDX-License-Identifier: BSD-3-Clause
// The host side of calls with a pair bias: fills in the parameters of the kernels of the route and launches them.
#include "pair_bias.h"

#include "../host/dispatch.h"
#include "fused.h"

namespace fdm::cuda {
namespace {

LiveTiles live_tiles(const fdm_problem &p, void *workspace, const Part &part) {
  LiveTiles live{};
  live.words = at<uint32_t>(workspace, part);
  live.row_tiles = int32_t(ceil_div(p.queries, kPairBiasTileSm90));
  live.row_words = int32_t(ceil_div(p.keys, 32 * kPairBiasTileSm90));
  return live;
}

template <class Function> cudaError_t with_pair_bias_types(const fdm_problem &p, const Function &function) {
  return with_types<kMaxPairBiasHeadDim>(p, p.head_dim, PairBiasHeadDims{}, function);
}

// These set where the deltas of all sequences lie: in `memory`, or at the start of each row of dq.
void use_deltas(PairBiasBackward *work, float *memory) {
  const fdm_problem &p = work->call.p;
  work->deltas = memory;
  work->first_delta = 0;
  work->delta_batches = int32_t(p.batch);
  work->delta_batch = p.heads * p.queries;
  work->delta_head = p.queries;
  work->delta_row = 1;
}
void use_deltas_in_dq(PairBiasBackward *work) {
  const fdm_tensor &dq = work->a.dq;
  work->deltas = static_cast<float *>(dq.data);
  work->delta_batch = dq.stride[0] / 2;
  work->delta_row = dq.stride[1] / 2;
  work->delta_head = dq.stride[2] / 2;
}

// Runs the fused kernel. Clears its sums and deltas first.
cudaError_t run_all_gradients(PairBiasBackward &work, const PairBiasBackwardRoute &route, void *workspace,
                              cudaStream_t stream) {
  char *const non_finite = at<char>(workspace, route.non_finite), *const rest = at<char>(workspace, route.rest);
  work.non_finite = reinterpret_cast<uint32_t *>(non_finite);
  if (cudaError_t error = cudaMemsetAsync(non_finite, 0, rest - non_finite + route.fused_launches.bytes(), stream))
    return error;
  if (route.live.exists()) {
    work.live = live_tiles(work.call.p, workspace, route.live);
    if (cudaError_t error = launch_live_tiles(work.call, work.live, stream)) return error;
  }
  if (route.fused_launches.deltas_in_dq) use_deltas_in_dq(&work);
  if (route.fused_launches.delta_bytes == 0)
    if (cudaError_t error = launch_deltas(work, route.statistics_division, MakeDeltas::first, stream)) return error;
  if (cudaError_t error = run_fused(work, route, rest, stream)) return error;
  if (route.fused_launches.keeps_deltas()) return cudaSuccess;
  use_deltas(&work, at<float>(workspace, route.deltas));
  return launch_deltas(work, route.statistics_division, MakeDeltas::again, stream);
}

// Computes dbias if an element has several sources.
cudaError_t run_dbias(PairBiasBackward &work, const PairBiasBackwardRoute &route, void *workspace,
                      cudaStream_t stream) {
  static_cast<DbiasDivision &>(work.dbias) = route.dbias;
  if (route.dbias_parts == DbiasParts::workspace) work.dbias.parts = at<float>(workspace, route.rest);
  if (route.dbias_parts == DbiasParts::in_dk) work.dbias.parts = static_cast<float *>(work.a.dk.data);
  if (cudaError_t error = with_pair_bias_types(work.call.p, [&](auto element, auto dim) {
        return launch_pair_bias_dbias<typename decltype(element)::Type, dim>(work, stream);
      }))
    return error;
  return route.dbias_sum.columns > 0 ? launch_pair_bias_dbias_sum(work, route.dbias_sum, stream) : cudaSuccess;
}

cudaError_t run_dq(PairBiasBackward &work, const PairBiasTiles &tiles, cudaStream_t stream) {
  static_cast<PairBiasTiles &>(work) = tiles;
  return with_pair_bias_types(work.call.p, [&](auto element, auto dim) {
    return launch_pair_bias_dq<typename decltype(element)::Type, dim>(work, stream);
  });
}

cudaError_t run_dkdv(PairBiasBackward &work, const PairBiasTiles &tiles, cudaStream_t stream) {
  static_cast<PairBiasTiles &>(work) = tiles;
  return with_pair_bias_types(work.call.p, [&](auto element, auto dim) {
    return launch_pair_bias_dkdv<typename decltype(element)::Type, dim>(work, stream);
  });
}

} // namespace

cudaError_t run_pair_bias_forward(const fdm_problem &p, const fdm_forward_args &args, const ForwardRoute &route,
                                  const Alignment &alignment, void *workspace) {
  PairBiasForward work{};
  static_cast<PairBiasForwardWork &>(work) = route.pair_bias;
  work.call = {route.pair_bias_facts, p};
  work.a = args;
  work.out_aligned = alignment.out;
  if (route.partials.exists()) work.partials = partials_at(at<void>(workspace, route.partials), p, work.splits);
  const auto stream = static_cast<cudaStream_t>(p.context.stream);
  if (route.live.exists()) {
    work.live = live_tiles(p, workspace, route.live);
    if (cudaError_t error = launch_live_tiles(work.call, work.live, stream)) return error;
  }
  const PairBiasForwardLaunch launch{route, work};
  cudaError_t error;
  if (route.kernel == ForwardKernel::pair_bias)
    error = with_pair_bias_types(p, [&](auto element, auto dim) {
      return launch_pair_bias_forward<typename decltype(element)::Type, dim>(launch, stream);
    });
  else
    error = with_sm90_types(p, [&](auto element, auto dim) {
      return launch_pair_bias_forward_sm90<typename decltype(element)::Type, dim>(launch, stream);
    });
  return error || !route.partials.exists() ? error : launch_combine(p, args, route, work.partials, stream);
}

cudaError_t run_pair_bias_backward(const fdm_problem &p, const fdm_backward_args &args,
                                   const PairBiasBackwardRoute &route, const Alignment &alignment, void *workspace) {
  PairBiasBackward work{};
  work.call = {route.facts, p};
  work.a = args;
  work.writes_dbias = route.writes_dbias;
  work.dbias_pairs = alignment.dbias_pairs;
  const auto stream = static_cast<cudaStream_t>(p.context.stream);
  use_deltas(&work, at<float>(workspace, route.deltas));
  if (cudaError_t error = route.fused ? run_all_gradients(work, route, workspace, stream)
                                      : launch_deltas(work, route.statistics_division, MakeDeltas::first, stream))
    return error;
  // dbias runs first, because its partial tiles may lie in dk.
  if (route.wants_dbias)
    if (cudaError_t error = run_dbias(work, route, workspace, stream)) return error;
  if (route.wants_dq)
    if (cudaError_t error = run_dq(work, route.dq, stream)) return error;
  return route.wants_dkdv ? run_dkdv(work, route.dkdv, stream) : cudaSuccess;
}

} // namespace fdm::cuda
