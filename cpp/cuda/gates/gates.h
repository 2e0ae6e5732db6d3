// SPDX-License-Identifier: BSD-3-Clause
// Forget gates: fdm_pack.forget and forget_backward of the CUDA packs.
#pragma once

#include <cuda_runtime_api.h>

#include "../../pack.h"

namespace fdm::cuda {

cudaError_t run_forget(const fdm_forgetting &f, void *workspace);
cudaError_t run_forget_backward(const fdm_forgetting &f, void *workspace);

} // namespace fdm::cuda
