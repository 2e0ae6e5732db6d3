// SPDX-License-Identifier: BSD-3-Clause
//
// A selection within an attention call.
#pragma once

#include "broadcast.h"
#include "record.h"

namespace fdm {

// The selection of record.window keys by the bias of a causal problem, within its mask, and of the first and last
// keys. Bias and mask must be the same for every query. start and end have no memory yet.
fdm_selection selection_of(const fdm_problem &problem, const Extents &extents, const AttentionRecord &record);

// The maximum keys that a query keeps, at least 1.
int64_t max_kept_keys(const fdm_selection &selection);

// The padded bytes of start or end.
int64_t bound_bytes(const fdm_selection &selection);

} // namespace fdm
