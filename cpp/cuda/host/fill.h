// SPDX-License-Identifier: BSD-3-Clause
// Fills memory that no other kernel writes.
#pragma once

#include <cuda_runtime_api.h>

#include "../route/helper_work.h"

namespace fdm::cuda {

// Fills a tensor of any strides with zeros; does nothing if it is absent.
cudaError_t launch_fill_zero(const fdm_tensor &t, cudaStream_t stream);

// Writes the rows of a packed batch outside all sequences: rows before cu_seqlens_q[0] and after its last bound, as
// in tensors padded to a multiple. They keep no key, so out is 0 and lse is -inf.
cudaError_t launch_unused_rows(const fdm_problem &p, const fdm_forward_args &args, const FillWork &work,
                               cudaStream_t stream);

} // namespace fdm::cuda
