// SPDX-License-Identifier: BSD-3-Clause
#include "make_plan.h"

#include "../dense/dense.h"
#include "../forward/forward.h"

namespace fdm::cuda {

int64_t plan_workspace_bytes(const fdm_problem &p) {
  return !is_dense(p) && is_interval_plan(mask_kind(p)) ? interval_plan_workspace_bytes(p) : 0;
}

cudaError_t make_plan(const fdm_problem &p, const Plan &plan, void *workspace, cudaStream_t stream) {
  const fdm_mask_kind kind = mask_kind(p);
  if (kind == FDM_MASK_NONE || is_dense(p) || needs_no_plan(p)) return cudaSuccess;
  return kind == FDM_MASK_ROWS ? make_row_plan(p, plan, stream) : make_interval_plan(p, plan, workspace, stream);
}

} // namespace fdm::cuda
