// SPDX-License-Identifier: BSD-3-Clause
#include "fused.h"

#include <algorithm>
#include <array>

namespace fdm::cuda {
namespace {

// The sums of a gradient in the first launch. Their first halves lie in the memory of the gradient itself.
GradientSums sums_in_gradient(const fdm_tensor &t, char *workspace) {
  GradientSums sums{};
  sums.first = static_cast<char *>(t.data);
  sums.spare = workspace;
  sums.batch = 2 * t.stride[0];
  sums.row = 2 * t.stride[1];
  sums.head = 2 * t.stride[2];
  sums.rows = t.shape[1];
  return sums;
}
GradientSums sums_in_workspace(const FusedLaunches &launches, const fdm_tensor &t, char *workspace, int64_t bytes) {
  GradientSums sums{};
  sums.first = workspace;
  sums.second = workspace + launches.work.batches * bytes;
  sums.batch = bytes;
  sums.row = 2 * launches.dim;
  sums.rows = round_up(t.shape[1], kPairBiasTileSm90);
  sums.head = sums.rows * sums.row;
  sums.before_spare = launches.work.batches;
  return sums;
}

} // namespace

cudaError_t run_fused(PairBiasBackward &work, const PairBiasBackwardRoute &route, char *memory, cudaStream_t stream) {
  const FusedLaunches &launches = route.fused_launches;
  const fdm_problem &p = work.call.p;
  const fdm_backward_args &a = work.a;
  FusedWork &division = work.fused;
  memory += launches.deltas_bytes();
  const std::array sums_of_all = {&division.dq, &division.dk, &division.dv};
  const auto place = [&](GradientSums &sums, const fdm_tensor &t, int64_t bytes) {
    if (present(t) && bytes > 0)
      sums = launches.sums_in_gradients ? sums_in_gradient(t, memory) : sums_in_workspace(launches, t, memory, bytes);
    memory += (launches.sums_in_gradients ? launches.spare_sequences : 2 * launches.work.batches) * bytes;
  };
  place(division.dq, a.dq, launches.query_bytes);
  place(division.dk, a.dk, launches.key_bytes);
  place(division.dv, a.dv, launches.key_bytes);
  division.dbias = present(a.dbias) && launches.dbias_bytes > 0 ? reinterpret_cast<float *>(memory) : nullptr;
  // The caller has cleared sums in the workspace together with `non_finite`.
  if (launches.sums_in_gradients)
    for (const GradientSums *sums : sums_of_all)
      if (sums->first)
        if (cudaError_t error = cudaMemsetAsync(
                sums->first, 0, std::min<int64_t>(2 * launches.work.batches, p.batch) * sums->batch, stream))
          return error;
  for (int64_t first = 0, batches; first < p.batch; first += batches) {
    const int64_t left = p.batch - first;
    static_cast<FusedDivision &>(division) = launches.launch(first, &batches);
    if (launches.sums_in_gradients) {
      for (GradientSums *sums : sums_of_all) {
        sums->second = sums->first + batches * sums->batch;
        sums->before_spare = int32_t(std::min(batches, left - batches));
      }
      work.first_delta = int32_t(first);
      work.delta_batches = int32_t(batches);
      if (cudaError_t error = launch_deltas(work, route.statistics_division, MakeDeltas::first, stream)) return error;
    }
    if (cudaError_t error = with_sm90_types(p, [&](auto element, auto dim) {
          return launch_pair_bias_fused<typename decltype(element)::Type, dim>(work, stream);
        }))
      return error;
    const bool completes_dbias = division.dbias && (!launches.shares_bias || !division.clears_sums);
    if (cudaError_t error = launch_fused_sums(work, completes_dbias, stream)) return error;
    if (launches.sums_in_gradients)
      for (GradientSums *sums : sums_of_all)
        if (sums->first) sums->first += batches * sums->batch;
  }
  return cudaSuccess;
}

} // namespace fdm::cuda
