// SPDX-License-Identifier: BSD-3-Clause
// The host interface of the decode kernels.
#pragma once

#include "forward.h"

namespace fdm::cuda {

// The thread blocks per SM that registers allow. Routes split the columns to fill them.
constexpr int decode_blocks(int64_t head_dim) {
  return int(head_dim <= 64 ? kRouteTable.decode_blocks_64 : kRouteTable.decode_blocks_256);
}

constexpr bool kHasClusters = FDM_TILE_ARCH == 90;
// The most splits of a cluster, which merges their results.
constexpr int kClusterSplits = int(kRouteTable.cluster_splits);

// Launches one instantiation, for head dimensions up to kHeadDim. The grid has a thread block for each group of
// heads_per_tile heads and each split.
template <class Element, int kHeadDim> cudaError_t launch_decode(const ForwardLaunch &work, cudaStream_t stream);

} // namespace fdm::cuda
