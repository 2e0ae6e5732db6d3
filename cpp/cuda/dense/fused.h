// SPDX-License-Identifier: BSD-3-Clause
// The fused kernel on the host: all gradients of dense blocks, a launch after the other.
#pragma once

#include "fused_plan.h"

namespace fdm::cuda {

// The bytes of a gradient that fill memory without a gap, which can hold something else until it is written.
int64_t contiguous_bytes(const fdm_tensor &t);

// Whether dq, dk and dv may hold sums until they are written. Each sequence must fill memory without a gap.
bool may_hold_sums(const fdm_tensor &t);

// All gradients, unless something odd is found. `memory` is cleared: for a launch's deltas, if these are not kept, and for
// what the workspace has of the sums.
cudaError_t run_fused(DenseBackward &work, const FusedPlan &plan, char *memory, int sms, cudaStream_t stream);

} // namespace fdm::cuda
