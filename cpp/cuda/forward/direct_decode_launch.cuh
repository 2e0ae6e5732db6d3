// SPDX-License-Identifier: BSD-3-Clause
// The launch of a direct_decode instantiation. Generated files hold nothing but an include of this and a line for each.
#pragma once

#include <algorithm>

#include "../host/launch.cuh"
#include "direct_decode.cuh"

namespace fdm::cuda {

// Chooses how many warps a block has, and how many blocks a cluster: as few warps as take their keys at once, since the
// instructions of each count, and no more where blocks have to share SMs; more splits cost little, but all clusters
// have to run at the same time.
template <class Config> cudaError_t divide_keys(DirectDecodeParams &params) {
  constexpr int64_t kFewWarps = 4;
  int sms;
  if (cudaError_t error = sm_count(&sms)) return error;
  const int64_t blocks = params.sequences * params.blocks * params.parts,
                warps = std::max<int64_t>(1, ceil_div(params.keys, kDirectKeys * params.parts));
  int64_t splits = std::clamp<int64_t>(std::min(ceil_div(warps, kFewWarps), sms / blocks), 1, kMostDirectSplits);
  for (int64_t most = 0; splits > 1; --splits) {
    if (cudaError_t error = most_clusters<DirectDecodeShared<Config>, direct_decode_kernel<Config>>(
            int(splits), 32 * kMostDirectWarps, &most))
      return error;
    if (most >= blocks) break;
  }
  params.splits = int32_t(splits);
  params.warps = ceil_div(warps, splits) <= kFewWarps || blocks > sms ? int32_t(kFewWarps) : kMostDirectWarps;
  return cudaSuccess;
}

template <class Element, int kHeadDim>
cudaError_t launch_direct_decode(const DirectDecodeParams &problem, cudaStream_t stream) {
  using Config = DirectDecodeConfig<Element, kHeadDim>;
  DirectDecodeParams params = problem;
  if (cudaError_t error = divide_keys<Config>(params)) return error;
  const Grid grid(params.sequences * params.blocks * params.parts, params.splits, params.splits);
  return launch_with_shared<DirectDecodeShared<Config>, direct_decode_kernel<Config>, Overlap::kernel_ahead>(
      params, grid, 32 * params.warps, stream);
}

} // namespace fdm::cuda
