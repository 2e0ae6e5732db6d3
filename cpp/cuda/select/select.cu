// SPDX-License-Identifier: BSD-3-Clause
#include "select.h"

#include "../host/facts.h"
#include "../plan/make_plan.h"

namespace fdm::cuda {

// A caller without a result may want either form, so this is the larger size.
int64_t selection_workspace_bytes(const fdm_selection &s) {
  int64_t bytes = 0;
  if (!present(s.keep)) bytes = interval_selection_workspace_bytes(s);
  if (!present(s.start)) bytes = max64(bytes, selection_route(s, nullptr, any_device(built_for())).workspace_bytes);
  return bytes;
}

cudaError_t select_keys(const fdm_selection &s, void *workspace, cudaStream_t stream) {
  const SelectionRoute route = selection_route(s, nullptr, any_device(built_for()));
  switch (route.kernel) {
  case SelectionKernel::keep:
    return select_keep(s, route, stream);
  case SelectionKernel::parts:
    return select_keep_parts(s, route, workspace, stream);
  case SelectionKernel::list:
    return launch_short_selection(s, route, stream);
  case SelectionKernel::intervals:
    return select_intervals(s, route, workspace, stream);
  default:
    return cudaSuccess;
  }
}

} // namespace fdm::cuda
