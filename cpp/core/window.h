// SPDX-License-Identifier: BSD-3-Clause
//
// A selection that is a part of an attention call.
#pragma once

#include "broadcast.h"

namespace fdm {

// The selection of `window` keys by the bias of a causal problem, within its mask. Both must be the same for every query.
// start and end have no memory yet.
fdm_selection selection_of(const fdm_problem &problem, const Extents &extents, int64_t window);

// The bytes of start or end in memory of their own, padded.
int64_t bound_bytes(const fdm_selection &selection);

} // namespace fdm
