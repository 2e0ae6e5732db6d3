// SPDX-License-Identifier: BSD-3-Clause
#include "select.h"

#include "../../indexing.h"

namespace fdm::cuda {

int64_t selection_workspace_bytes(const fdm_selection &s) {
  return present(s.keep) ? 0 : interval_selection_workspace_bytes(s);
}

cudaError_t select_keys(const fdm_selection &s, void *workspace, cudaStream_t stream) {
  return present(s.keep) ? select_keep(s, stream) : select_intervals(s, workspace, stream);
}

} // namespace fdm::cuda
