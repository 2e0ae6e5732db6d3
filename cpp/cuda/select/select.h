// SPDX-License-Identifier: BSD-3-Clause
// Selection of the keys with the largest bias: fdm_pack.select of the CUDA packs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../route/route.h"

namespace fdm::cuda {

int64_t selection_workspace_bytes(const fdm_selection &s);

// Enqueues the selection. Its result equals that of the cpu pack bit for bit.
cudaError_t select_keys(const fdm_selection &s, void *workspace, cudaStream_t stream);

// The two forms of results: intervals, and booleans (keep). With select_keep_parts several thread blocks share a row.
int64_t interval_selection_workspace_bytes(const fdm_selection &s);
cudaError_t select_intervals(const fdm_selection &s, const SelectionRoute &route, void *workspace, cudaStream_t stream);
cudaError_t select_keep(const fdm_selection &s, const SelectionRoute &route, cudaStream_t stream);
cudaError_t select_keep_parts(const fdm_selection &s, const SelectionRoute &route, void *workspace,
                              cudaStream_t stream);

} // namespace fdm::cuda
