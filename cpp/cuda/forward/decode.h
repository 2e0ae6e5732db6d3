// SPDX-License-Identifier: BSD-3-Clause
// What the host needs to know of the decode kernels.
#pragma once

#include "forward.h"

namespace fdm::cuda {

// Blocks that an SM has registers for, and that the columns are divided for.
constexpr int decode_blocks(int64_t head_dim) {
  return int(head_dim <= 64 ? kRouteTable.decode_blocks_64 : kRouteTable.decode_blocks_256);
}

constexpr bool kHasClusters = FDM_TILE_ARCH == 90;
// Splits that are a cluster, which merges their results.
constexpr int kClusterSplits = int(kRouteTable.cluster_splits);

// Launches one instantiation, which serves head dimensions up to kHeadDim. It has a block for each group of
// heads_per_tile heads and each split.
template <class Element, int kHeadDim> cudaError_t launch_decode(const ForwardLaunch &work, cudaStream_t stream);

} // namespace fdm::cuda
