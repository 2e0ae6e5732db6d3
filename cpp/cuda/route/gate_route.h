// SPDX-License-Identifier: BSD-3-Clause
// The route of forget gates: how the sums along their rows are divided.
#pragma once

#include "../../indexing.h"
#include "part.h"

namespace fdm::cuda {

// A thread block sums a chunk of the gates of a row, so that a few long rows fill a GPU.
constexpr int kGateThreads = 256, kThreadGates = 4, kGateChunk = kGateThreads * kThreadGates;

struct GateRoute {
  int64_t chunks; // of a row
  int64_t blocks; // of threads: one for each chunk
  Part totals;    // float64 [row][chunk], of which a kernel of its own has as many blocks; one chunk needs none
  int64_t workspace_bytes;
};

GateRoute gate_route(const fdm_forgetting &f);

} // namespace fdm::cuda
