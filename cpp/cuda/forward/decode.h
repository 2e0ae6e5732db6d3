// SPDX-License-Identifier: BSD-3-Clause
// What the host needs to know of the decode kernels.
#pragma once

#include "forward.h"

namespace fdm::cuda {

// The query rows of a block: the queries of all heads_per_tile heads.
constexpr int kDecodeRows = 16;

// Blocks that an SM has registers for, and that the columns are divided for.
constexpr int decode_blocks(int64_t head_dim) { return head_dim <= 64 ? 2 : 1; }

// Splits that are a cluster: the largest that every GPU with clusters has (CUDA programming guide, thread block
// clusters).
constexpr bool kHasClusters = FDM_TILE_ARCH == 90;
constexpr int kMostClusterSplits = 8;

// Launches one instantiation, which serves head dimensions up to kHeadDim. It has a block for each group of
// heads_per_tile heads and each split.
template <class Element, int kHeadDim> cudaError_t launch_decode(const ForwardParams &params, cudaStream_t stream);

} // namespace fdm::cuda
