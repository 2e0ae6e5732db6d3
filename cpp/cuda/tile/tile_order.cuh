// SPDX-License-Identifier: BSD-3-Clause
// The order in which kernels go through the tiles of rows of a batch, so that tiles which are under way at a time read
// keys that L2 has room for.
#pragma once

#include "../../indexing.h"
#include "../plan/plan.cuh"

namespace fdm::cuda {

struct TileOrder {
  int32_t sequences, heads; // that are gone through together; heads of queries, those of whole groups
};

// What L2 has room for: an H100 has 50 MB, and keeps what all SMs read in both halves of it.
constexpr int64_t kL2Bytes = 20 << 20;

// Bytes of K and V of a key/value head that the tiles of one place read.
inline int64_t key_bytes_of_place(const fdm_problem &p) {
  constexpr int64_t kElementBytes = 2 + 2;
  const int64_t keys = p.max_kept > 0 ? min64(p.keys, p.max_kept + kTileRows) : p.keys;
  return keys * p.head_dim * kElementBytes;
}

// A causal mask makes the first tiles short: sequence after sequence, the same few blocks of threads could get the short
// ones of all of them. So as many as L2 has room for go together, in groups of nearly equal size.
inline int32_t sequences_together(const fdm_problem &p) {
  const int64_t fitting = max64(1, kL2Bytes / max64(1, key_bytes_of_place(p) * p.kv_heads));
  const int64_t groups = max64(1, ceil_div(p.batch, fitting));
  return static_cast<int32_t>(max64(1, ceil_div(p.batch, groups)));
}

// Of long sequences not even the heads of one fit. Those of some key/value heads go together, a divisor of their number,
// as long as these have several tiles for each SM: the last tiles of each group, which are short, even out what the long
// ones leave.
inline int32_t query_heads_together(const fdm_problem &p) {
  constexpr int64_t kLeastTiles = 1024;
  const int64_t tiles = ceil_div(is_varlen(p) ? total_rows(p) : p.queries, kTileRows), group = group_size(p);
  int64_t together = p.kv_heads;
  for (int64_t fewer = p.kv_heads - 1; fewer > 0 && together * key_bytes_of_place(p) > kL2Bytes; --fewer)
    if (p.kv_heads % fewer == 0 && fewer * group * tiles >= kLeastTiles) together = fewer;
  return static_cast<int32_t>(together * group);
}

inline TileOrder tile_order(const fdm_problem &p) { return {sequences_together(p), query_heads_together(p)}; }

} // namespace fdm::cuda
