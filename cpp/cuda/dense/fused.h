// SPDX-License-Identifier: BSD-3-Clause
// The fused kernel on the host: all gradients of dense blocks, a launch after the other.
#pragma once

#include "../host/dispatch.h"
#include "dense.h"

namespace fdm::cuda {

template <class Function> cudaError_t with_sm90_types(const fdm_problem &p, const Function &function) {
  return with_types<kMaxDenseSm90HeadDim>(p, DenseSm90HeadDims{}, function);
}

// All gradients, unless non-finite values are found. `memory` is cleared: for a launch's deltas, if these are not kept, and for
// what the workspace has of the sums.
cudaError_t run_fused(DenseBackward &work, const DenseBackwardRoute &route, char *memory, cudaStream_t stream);

} // namespace fdm::cuda
