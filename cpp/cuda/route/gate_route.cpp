// SPDX-License-Identifier: BSD-3-Clause
#include "gate_route.h"

#include "workspaces.h"

namespace fdm::cuda {

GateRoute gate_route(const fdm_forgetting &f) {
  GateRoute route{};
  route.chunks = ceil_div(f.log_forget.shape[3], kGateChunk);
  route.blocks = f.log_forget.shape[0] * f.log_forget.shape[1] * route.chunks;
  if (route.chunks > 1) {
    WorkspaceParts parts;
    route.totals = parts.take<double>(route.blocks);
    route.workspace_bytes = parts.bytes;
  }
  return route;
}

} // namespace fdm::cuda
