// SPDX-License-Identifier: BSD-3-Clause
// The order of the row tiles of a batch.
#pragma once

#include "route.h"

namespace fdm::cuda {

// Bytes of K and V of a KV head that concurrent tiles of it read.
inline int64_t kv_head_bytes(const fdm_problem &p) {
  constexpr int64_t kElementBytes = 2 + 2;
  const int64_t keys = p.max_kept > 0 ? min64(p.keys, kept_bound(p) + kTileRows) : p.keys;
  return keys * p.head_dim * kElementBytes;
}

// A causal mask makes the first tiles of a sequence short. In sequence order, the same few thread blocks could get
// the short tiles of all sequences. Therefore as many sequences as fit L2 are interleaved, in groups of nearly equal
// size.
inline int32_t interleaved_sequences(const fdm_problem &p, const RouteTable &table) {
  const int64_t fitting = max64(1, table.l2_bytes / max64(1, kv_head_bytes(p) * p.kv_heads));
  const int64_t groups = max64(1, ceil_div(p.batch, fitting));
  return static_cast<int32_t>(max64(1, ceil_div(p.batch, groups)));
}

// L2 cannot hold all heads of a long sequence. Then the query heads of a few KV heads are processed together. Their
// number divides the number of KV heads, and they have several tiles for each SM.
inline int32_t interleaved_query_heads(const fdm_problem &p, const RouteTable &table) {
  const int64_t tiles = ceil_div(total_rows(p), kTileRows), group = group_size(p);
  int64_t together = p.kv_heads;
  for (int64_t fewer = p.kv_heads - 1; fewer > 0 && together * kv_head_bytes(p) > table.l2_bytes; --fewer)
    if (p.kv_heads % fewer == 0 && fewer * group * tiles >= table.group_min_tiles) together = fewer;
  return static_cast<int32_t>(together * group);
}

inline TileOrder tile_order(const fdm_problem &p, const RouteTable &table) {
  return TileOrder(p, interleaved_sequences(p, table), interleaved_query_heads(p, table));
}

} // namespace fdm::cuda
