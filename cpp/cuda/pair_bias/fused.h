// SPDX-License-Identifier: BSD-3-Clause
// The host side of the fused kernel, which computes all gradients with a pair bias in one or more launches.
#pragma once

#include "../host/dispatch.h"
#include "pair_bias.h"

namespace fdm::cuda {

template <class Function> cudaError_t with_sm90_types(const fdm_problem &p, const Function &function) {
  if constexpr (FDM_TILE_ARCH != 90)
    return cudaErrorInvalidConfiguration; // other architectures have no such route
  else
    return with_types<kMaxPairBiasSm90HeadDim>(p, p.head_dim, PairBiasSm90HeadDims{}, function);
}

// Computes all gradients, unless non-finite values are found. `memory` is cleared. It holds the deltas of a launch,
// if these are not kept, and the workspace's part of the sums.
cudaError_t run_fused(PairBiasBackward &work, const PairBiasBackwardRoute &route, char *memory, cudaStream_t stream);

} // namespace fdm::cuda
