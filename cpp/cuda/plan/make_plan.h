// SPDX-License-Identifier: BSD-3-Clause
// Making the plans of the CUDA packs; plan.cuh describes them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "plan.cuh"

namespace fdm::cuda {

int64_t plan_workspace_bytes(const fdm_problem &p);

// Enqueues what turns the problem's mask into `plan`; nothing for a problem without a mask.
cudaError_t make_plan(const fdm_problem &p, const Plan &plan, void *workspace, cudaStream_t stream);

// Problems of few keys: one kernel makes a whole plan, and may also select the keys.
bool fits_short_lists(const fdm_problem &p);
bool fits_short_lists(const fdm_selection &s);
cudaError_t launch_short_lists(const fdm_problem &p, const Plan &plan, cudaStream_t stream);
cudaError_t launch_short_selection(const fdm_selection &s, cudaStream_t stream);
cudaError_t launch_short_lists(const fdm_selection &s, const fdm_problem &p, const Plan &plan, cudaStream_t stream);

// The two kinds of plans.
int64_t interval_plan_workspace_bytes(const fdm_problem &p);
cudaError_t make_interval_plan(const fdm_problem &p, const Plan &plan, void *workspace, cudaStream_t stream);
cudaError_t make_row_plan(const fdm_problem &p, const Plan &plan, cudaStream_t stream);

} // namespace fdm::cuda
