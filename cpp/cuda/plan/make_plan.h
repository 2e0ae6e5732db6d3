// SPDX-License-Identifier: BSD-3-Clause
// Makes the plans of the CUDA packs. plan.cuh describes them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../route/route.h"
#include "plan.cuh"

namespace fdm::cuda {

// Makes the plan of a problem, if it needs one.
cudaError_t make_plan(const fdm_problem &p, const Plan &plan, const DeviceFacts &device, void *workspace,
                      cudaStream_t stream);

// The launches of PlanKernel.
cudaError_t launch_row_lists(const fdm_problem &p, const Plan &plan, const PlanRoute &route, cudaStream_t stream);
cudaError_t launch_short_lists(const fdm_problem &p, const Plan &plan, const PlanRoute &route, cudaStream_t stream);
cudaError_t launch_tile_lists(const fdm_problem &p, const Plan &plan, const PlanRoute &route, cudaStream_t stream);
cudaError_t launch_chunk_lists(const fdm_problem &p, const Plan &plan, const PlanRoute &route, void *workspace,
                               cudaStream_t stream);

cudaError_t launch_runs(const fdm_problem &p, const Plan &plan, const PlanRoute &route, cudaStream_t stream);

// Makes the plan of a mask of blocks.
cudaError_t launch_block_lists(const fdm_problem &p, const fdm_mask_blocks &blocks, const Plan &plan,
                               const PlanRoute &route, cudaStream_t stream);

// The launch of SelectionKernel::list. The second also makes the plan of a problem.
cudaError_t launch_short_selection(const fdm_selection &s, const SelectionRoute &route, cudaStream_t stream);
cudaError_t launch_short_lists(const fdm_selection &s, const fdm_problem &p, const Plan &plan,
                               const SelectionRoute &route, cudaStream_t stream);

} // namespace fdm::cuda
