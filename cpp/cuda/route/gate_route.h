// SPDX-License-Identifier: BSD-3-Clause
// The route of forget gates: the division of the sums along their rows.
#pragma once

#include "../../indexing.h"
#include "part.h"

namespace fdm::cuda {

// A thread block sums a chunk of the gates of a row, so that a few long rows fill a GPU.
constexpr int kGateThreads = 256, kThreadGates = 4, kGateChunk = kGateThreads * kThreadGates;

struct GateRoute {
  int64_t chunks; // of a row
  int64_t blocks; // thread blocks: one for each chunk
  Part totals;    // float64 [row][chunk], which a separate kernel with as many blocks computes; absent with one chunk
  int64_t workspace_bytes;
};

GateRoute gate_route(const fdm_forgetting &f);

} // namespace fdm::cuda
