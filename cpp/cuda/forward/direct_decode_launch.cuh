// SPDX-License-Identifier: BSD-3-Clause
// The launch of a direct_decode instantiation. Generated files contain only an include of this file and one line for
// each.
#pragma once

#include "../host/launch.cuh"
#include "direct_decode.cuh"

namespace fdm::cuda {

// Finds the most splits for which all clusters run at the same time. The splits of a block are a cluster. Only the
// driver knows how many clusters of a kernel fit.
template <class Config> cudaError_t find_resident_splits(const DirectDecodeLaunch &work, int32_t *splits) {
  for (*splits = work.route.direct.max_splits; *splits > 1; --*splits) {
    int64_t most = 0;
    if (cudaError_t error =
            max_clusters<DirectDecodeShared<Config>, direct_decode_kernel<Config>>(*splits, 32 * kDirectWarps, &most))
      return error;
    if (most >= work.route.blocks) break;
  }
  return cudaSuccess;
}

template <class Element, int kHeadDim>
cudaError_t launch_direct_decode(const DirectDecodeLaunch &work, cudaStream_t stream) {
  using Config = DirectDecodeConfig<Element, kHeadDim>;
  DirectDecodeParams params = work.params;
  if (cudaError_t error = find_resident_splits<Config>(work, &params.splits)) return error;
  params.warps =
      work.route.direct.warps(*work.device.table, params.keys, work.route.blocks, params.splits, work.device.sms);
  const Grid grid(work.route.blocks, params.splits, params.splits);
  return launch_with_shared<DirectDecodeShared<Config>, direct_decode_kernel<Config>, Overlap::kernel_ahead>(
      params, grid, 32 * params.warps, stream);
}

} // namespace fdm::cuda
