// SPDX-License-Identifier: BSD-3-Clause
#include "make_plan.h"

namespace fdm::cuda {

cudaError_t make_plan(const fdm_problem &p, const Plan &plan, const DeviceFacts &device, void *workspace,
                      cudaStream_t stream) {
  const PlanRoute route = plan_route(p, device);
  switch (route.kernel) {
  case PlanKernel::rows:
    return launch_row_lists(p, plan, route, stream);
  case PlanKernel::list:
    return launch_short_lists(p, plan, route, stream);
  case PlanKernel::tiles:
    return launch_tile_lists(p, plan, route, stream);
  case PlanKernel::chunks:
    return launch_chunk_lists(p, plan, route, workspace, stream);
  case PlanKernel::runs:
    return launch_runs(p, plan, route, stream);
  default:
    return cudaSuccess;
  }
}

} // namespace fdm::cuda
