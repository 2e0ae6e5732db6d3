// SPDX-License-Identifier: BSD-3-Clause
#include "select.h"

#include "../plan/make_plan.h"

namespace fdm::cuda {

int64_t selection_workspace_bytes(const fdm_selection &s) {
  return present(s.keep) ? 0 : interval_selection_workspace_bytes(s);
}

cudaError_t select_keys(const fdm_selection &s, void *workspace, cudaStream_t stream) {
  const SelectionRoute route = selection_route(s, nullptr, route_table(FDM_TILE_ARCH));
  switch (route.kernel) {
  case SelectionKernel::keep:
    return select_keep(s, route, stream);
  case SelectionKernel::list:
    return launch_short_selection(s, route, stream);
  case SelectionKernel::intervals:
    return select_intervals(s, route, workspace, stream);
  default:
    return cudaSuccess;
  }
}

} // namespace fdm::cuda
