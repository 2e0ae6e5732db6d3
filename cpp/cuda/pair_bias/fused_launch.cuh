// SPDX-License-Identifier: BSD-3-Clause
// Launches the fused kernel of pair biases.
#pragma once

#include <algorithm>

#include "pair_bias.h"
#include "tile_sizes.cuh"
#if FDM_TILE_ARCH == 90
#include "../host/launch_sm90.cuh"
#include "sm90/fused.cuh"
#endif

namespace fdm::cuda {

#if FDM_TILE_ARCH == 90
// Only the driver knows how many clusters of a kernel run concurrently.
template <class Config> cudaError_t launch_clusters(const PairBiasBackward &work, cudaStream_t stream) {
  using Shared = PairBiasFusedShared<Config>;
  const int64_t blocks = int64_t(work.fused.row_tiles) * work.fused.key_tiles;
  int64_t clusters;
  if (cudaError_t error = max_clusters<Shared, pair_bias_fused_kernel<Config>>(int(blocks), Roles::kThreads, &clusters))
    return error;
  if (clusters == 0) return cudaErrorInvalidConfiguration;
  PairBiasBackward cluster_work = work;
  if (cluster_work.fused.splits == 0)
    cluster_work.fused.splits = work.fused.cluster_splits(kRouteTable.fused_task_steps, clusters);
  const Grid grid(std::min<int64_t>(int64_t(cluster_work.fused.planes) * cluster_work.fused.splits, clusters), blocks,
                  blocks);
  return launch_with_shared<Shared, pair_bias_fused_kernel<Config>>(cluster_work, grid, Roles::kThreads, stream);
}
#endif

template <class Element, int kHeadDim>
cudaError_t launch_pair_bias_fused(const PairBiasBackward &work, cudaStream_t stream) {
#if FDM_TILE_ARCH == 90
  const FusedWork &division = work.fused;
  const auto launch_for = [&](auto bias_type) {
    constexpr BiasType kBias = decltype(bias_type)::value;
    if constexpr (kHeadDim == kSmallTileHeadDim) {
      using SmallTiles = PairBiasFusedConfig<Element, kHeadDim, kBias, FusedEpilogue::small_tiles>;
      if (division.small_tiles)
        return launch_with_shared<PairBiasFusedShared<SmallTiles>, pair_bias_fused_kernel<SmallTiles>>(
            work, division.blocks, Roles::kThreads, stream);
    }
    using Config = PairBiasFusedConfig<Element, kHeadDim, kBias, FusedEpilogue::sums>;
    if constexpr (!Config::kInTurn)
      if (division.clusters)
        return launch_clusters<PairBiasFusedConfig<Element, kHeadDim, kBias, FusedEpilogue::exchange>>(work, stream);
    return launch_with_shared<PairBiasFusedShared<Config>, pair_bias_fused_kernel<Config>, Overlap::kernel_ahead>(
        work, division.blocks, Roles::kThreads, stream);
  };
  return work.call.p.bias.dtype == FDM_FLOAT32 ? launch_for(kFloat32Type) : launch_for(kElementType);
#else
  return cudaErrorInvalidConfiguration;
#endif
}

} // namespace fdm::cuda
