// SPDX-License-Identifier: BSD-3-Clause
// The host side of the fused kernel, which computes all gradients with a pair bias in one or more launches.
#pragma once

#include "../host/dispatch.h"
#include "pair_bias.h"

namespace fdm::cuda {

template <class Function> cudaError_t with_sm90_types(const fdm_problem &p, const Function &function) {
  if constexpr (FDM_TILE_ARCH != 90)
    return cudaErrorInvalidConfiguration; // routes of other architectures have none
  else
    return with_types<kMaxPairBiasSm90HeadDim>(p, p.head_dim, PairBiasSm90HeadDims{}, function);
}

// All gradients, unless non-finite values are found. `memory` is cleared: for a launch's deltas, if these are not kept,
// and for what the workspace has of the sums.
cudaError_t run_fused(PairBiasBackward &work, const PairBiasBackwardRoute &route, char *memory, cudaStream_t stream);

} // namespace fdm::cuda
