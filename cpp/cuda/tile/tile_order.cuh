// SPDX-License-Identifier: BSD-3-Clause
// The order in which persistent kernels go through the tiles of a batch.
#pragma once

#include "../../indexing.h"
#include "../plan/plan.cuh"

namespace fdm::cuda {

// How many sequences of a batch are gone through together, from their last tiles to their first. A causal mask makes the
// first tiles short: sequence after sequence, the same few blocks of threads could get the short ones of all of them.
//
// L2 has room for the keys that tiles of one place read of so many sequences, so that the next tiles find them there. The
// batch is divided into groups of nearly equal size.
inline int32_t sequences_together(const fdm_problem &p) {
  constexpr int64_t kL2Bytes = 20 << 20;   // an H100 has 50 MB, and keeps what all SMs read in both halves of it
  constexpr int64_t kElementBytes = 2 + 2; // of K and of V
  const int64_t keys = p.max_kept > 0 ? min64(p.keys, p.max_kept + kTileRows) : p.keys;
  const int64_t bytes = max64(1, keys * p.kv_heads * p.head_dim * kElementBytes);
  const int64_t fitting = max64(1, kL2Bytes / bytes);
  const int64_t groups = max64(1, ceil_div(p.batch, fitting));
  return static_cast<int32_t>(max64(1, ceil_div(p.batch, groups)));
}

} // namespace fdm::cuda
